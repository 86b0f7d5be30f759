"""The stages of training, a file each, in the paper's order.

To add a stage, write a file with its record and add it to STAGES.
"""

from glm5_jax.config.stages import (
    async_rl,
    distill,
    dsa_sparse,
    dsa_warmup,
    pretrain,
    rl,
    sft,
)
from glm5_jax.config.stages.record import METRICS, SUCCESS, Feed, Metric, Stage, Update

STAGES = (
    pretrain.STAGE,
    dsa_warmup.STAGE,
    dsa_sparse.STAGE,
    sft.STAGE,
    rl.STAGE,
    async_rl.STAGE,
    distill.STAGE,
)
BY_NAME = {stage.name: stage for stage in STAGES}

__all__ = [
    "BY_NAME",
    "METRICS",
    "STAGES",
    "SUCCESS",
    "Feed",
    "Metric",
    "Stage",
    "Update",
]
