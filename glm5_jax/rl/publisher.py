"""Publication of the trainer's weights to the engine: a copy with a version.

The engine needs a copy because the trainer's next update donates its own buffers.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.model import layers, transformer


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
      weights: "int8" rounds the copied matrices of the layers, as an engine with
        quantised weights would. The trainer's parameters do not change.
    """
    engine.publish(_copy(params, engine.config, weights), version)


def rounded_to_int8(weight: Float[Array, "*n width"]) -> Float[Array, "*n width"]:
    """Rounds each vector of the last dim to multiples -127 .. 127 of a scale."""
    largest = jnp.max(jnp.abs(weight), axis=-1, keepdims=True)
    # A scale below tiny is flushed to 0, and vectors of zeros would become NaN.
    scale = jnp.maximum(largest / 127, jnp.finfo(weight.dtype).tiny)
    return jnp.round(weight / scale) * scale


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copy(
    params: dict, config: config_lib.ModelConfig, weights: config_lib.RolloutWeights
) -> dict:
    """Returns a copy; never rounds embeddings, head, norms and routers."""

    def one(path: tuple, weight: Array, param: layers.Param) -> Array:
        is_layer = path[0].key.startswith("layers")
        num_dims = len(param.dims) - ("L" in param.dims)
        if weights == "int8" and is_layer and num_dims > 1 and not param.is_float32:
            return rounded_to_int8(weight)
        return jnp.copy(weight)

    return jax.tree_util.tree_map_with_path(one, params, transformer.table(config))
