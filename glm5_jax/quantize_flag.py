"""The flag --quantize of the commands that run a model."""

from absl import flags

from glm5_jax import config

SCHEME = flags.DEFINE_enum(
    "quantize",
    config.STORED,
    [config.STORED, *config.QUANTIZATION_SCHEMES],
    "Scheme to which weights are rounded as they are read; default: as they are.",
)
