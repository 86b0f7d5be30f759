"""Supervised fine-tuning: turns of the assistant (arXiv 2602.15763, section 3.1)."""

from glm5_jax.config.stages import record

STAGE = record.Stage(
    name="sft",
    feed="conversations",
    losses=("next_token", "mtp", "balance", "indexer_kl"),
    can_measure_success=True,
)
