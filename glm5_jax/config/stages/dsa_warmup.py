"""DSA warm-up: the indexers alone learn, from the attention over all tokens."""

from glm5_jax.config.stages import record


def _is_of_an_indexer(path: record.Path) -> bool:
    return "indexer" in path


def needs_indexer_loss(config: record.Config) -> list[record.Rule]:
    """Returns the rules that there is an indexer, and that its loss has a weight."""
    return [
        (
            "latent" in config.model.layer_attention,
            f"model.layer_types must have a 'latent' layer in stage {config.stage!r}: "
            f"the other types have no indexer.",
        ),
        (
            config.loss.indexer_weight > 0,
            f"loss.indexer_weight must be > 0 in stage {config.stage!r}: it is what "
            f"trains the indexer.",
        ),
    ]


STAGE = record.Stage(
    name="dsa_warmup",
    losses=("indexer_kl",),
    monitored=("next_token", "mtp", "balance"),
    trains=_is_of_an_indexer,
    moves_router_bias=False,
    attention="dense_with_indexer_loss",
    rules=needs_indexer_loss,
)
