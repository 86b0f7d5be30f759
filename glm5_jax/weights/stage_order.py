"""The order of stages: a run starts from a model that is ready for it."""

from glm5_jax import config as config_lib
from glm5_jax.config import checks


def require_ready_indexers(
    config: config_lib.TrainConfig, theirs: config_lib.AttentionMode
) -> None:
    """Checks the order of stages: dense, dsa_warmup, dsa_sparse, all later ones.

    Args:
      config: of the run.
      theirs: attention of the model at init_from; a released model's is sparse.

    Raises:
      InputError: the indexers of that model are not ready for the stage.
    """
    ours, adapts = config.model.attention, config.stage_record.adapts_to_selection
    nevertheless = (
        """--config.init_from_changes="('attention',)" starts nevertheless."""
    )
    start = f"The model at init_from={config.init_from}"
    checks.require(
        (
            ours != "sparse" or theirs != "dense",
            f"{start} has dense attention: its indexers were never trained, and would "
            f"select keys at random. Run stage dsa_warmup from it, then dsa_sparse; or "
            f"set model.attention='dense'. {nevertheless}",
        ),
        (
            ours != "sparse" or adapts or theirs != "dense_with_indexer_loss",
            f"{start} has warmed-up indexers, but has never attended to the keys that "
            f"they select. Run stage dsa_sparse from it before stage "
            f"{config.stage!r}. {nevertheless}",
        ),
        (
            ours != "dense_with_indexer_loss" or theirs != "sparse",
            f"{start} attends to selected keys already; stage {config.stage!r} is for "
            f"a model with dense attention. Continue with stage dsa_sparse. "
            f"{nevertheless}",
        ),
    )
