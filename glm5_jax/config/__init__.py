"""All settings of a run: frozen dataclasses that check themselves.

The fields of ModelConfig have the names of the Hugging Face config.json, and its
defaults are GLM-5 (zai-org/GLM-5). All defaults of a run are defined here.
"""

from glm5_jax.config.attention import AttentionVariants
from glm5_jax.config.checks import DamagedError, InputError
from glm5_jax.config.data import (
    INTERLEAVE_TOKENS,
    DataConfig,
    DocumentKind,
    PrepareConfig,
)
from glm5_jax.config.health import HealthConfig
from glm5_jax.config.mesh import MeshConfig
from glm5_jax.config.model import (
    AttentionMode,
    CacheDtype,
    Dtype,
    ModelConfig,
    RematPolicy,
)
from glm5_jax.config.optim import LossConfig, OptimConfig
from glm5_jax.config.quantization import (
    CALIBRATIONS,
    QUANTIZATION_SCHEMES,
    STORED,
    QuantizationScheme,
    RolloutWeights,
)
from glm5_jax.config.rl import (
    DIS_AGENTIC,
    DIS_REASONING,
    AdvantageStd,
    LossMean,
    Quarantine,
    RLConfig,
)
from glm5_jax.config.rope import RopeScaling
from glm5_jax.config.train import (
    TRACKERS,
    StageName,
    TrainConfig,
)

__all__ = [
    "CALIBRATIONS",
    "DIS_AGENTIC",
    "DIS_REASONING",
    "INTERLEAVE_TOKENS",
    "QUANTIZATION_SCHEMES",
    "STORED",
    "TRACKERS",
    "AdvantageStd",
    "AttentionMode",
    "AttentionVariants",
    "CacheDtype",
    "DamagedError",
    "DataConfig",
    "DocumentKind",
    "Dtype",
    "HealthConfig",
    "InputError",
    "LossConfig",
    "LossMean",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "PrepareConfig",
    "QuantizationScheme",
    "Quarantine",
    "RLConfig",
    "RematPolicy",
    "RolloutWeights",
    "RopeScaling",
    "StageName",
    "TrainConfig",
]
