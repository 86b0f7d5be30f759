"""Publication of the trainer's weights to the engine: a copy with a version.

The engine needs a copy because the trainer's next update donates its own buffers.
"""

import functools

import jax
import jax.numpy as jnp

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.model import transformer
from glm5_jax.quantization import schemes


def publish(
    engine: engine_lib.Engine,
    params: dict,
    version: int,
    weights: config_lib.RolloutWeights = "same",
) -> None:
    """Makes an engine sample with `params` from its next step on.

    Args:
      engine: records `version` with every token that it samples.
      params: the trainer's parameters; they are copied.
      version: the position at which the parameters are published, which is the number
        of batches drawn before (training/feeds/feed.py).
      weights: the scheme that quantizes the copy, or "same". The trainer's parameters
        do not change.
    """
    engine.publish(_copy(params, engine.config, weights), version)


@functools.partial(jax.jit, static_argnums=(1, 2))
def rollout_params(
    params: dict, config: config_lib.ModelConfig, weights: config_lib.RolloutWeights
) -> dict:
    """Returns parameters as engines compute with them: cast, or quantized before."""
    if weights != "same":
        dims, scheme = transformer.param_dims(config), schemes.SCHEMES[weights]
        params = schemes.quantized(params, dims, scheme)
    return transformer.cast(params, config)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copy(
    params: dict, config: config_lib.ModelConfig, weights: config_lib.RolloutWeights
) -> dict:
    return jax.tree.map(jnp.copy, rollout_params(params, config, weights))
