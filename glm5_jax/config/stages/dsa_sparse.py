"""Sparse adaptation: the whole model learns to attend to selected tokens."""

from glm5_jax.config.stages import dsa_warmup, record

STAGE = record.Stage(
    name="dsa_sparse",
    losses=("next_token", "mtp", "balance", "indexer_kl"),
    attention="sparse",
    adapts_to_selection=True,
    rules=dsa_warmup.needs_indexer_loss,
)
