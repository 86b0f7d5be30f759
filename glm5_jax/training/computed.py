"""The weights that a training step computes with: cast, and perhaps rounded."""

import jax

from glm5_jax import config as config_lib
from glm5_jax.model import transformer
from glm5_jax.quantization import schemes


def weights(params: dict, config: config_lib.TrainConfig) -> dict:
    """Returns the parameters as a step computes with them.

    Gradients are taken with respect to these, and move the parameters themselves. In
    quantization-aware training, whose weights are rounded here, that is the
    straight-through estimate (arXiv 1308.3432): the rounding counts as the identity.
    """
    return transformer.cast(rounded(params, config), config.model)


def rounded(params: dict, config: config_lib.TrainConfig) -> dict:
    """Returns the values that the quantized parameters have, bit for bit.

    Without quantization-aware training these are the parameters.
    """
    if config.quantization_aware == "none":
        return params
    dims = transformer.param_dims(config.model)
    return schemes.rounded(params, dims, schemes.SCHEMES[config.quantization_aware])


def measured(params: dict, config: config_lib.TrainConfig) -> dict:
    """Returns the parameters that evaluations measure, rounded by a program."""
    if config.quantization_aware == "none":
        return params
    return jax.jit(rounded, static_argnums=1)(params, config)
