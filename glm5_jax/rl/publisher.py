"""Weights on their way from the trainer to the engine: a copy with a version.

The trainer's next update takes its buffers back (they are donated), so the engine gets
its own.
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
    """Lets an engine draw from `params` from its next step on.

    Args:
      engine: whose tokens will bear `version`.
      params: of the trainer; they are copied.
      version: of the parameters: the batches drawn before them (`position` in
        training/feeds/feed.py).
      weights: "int8" rounds the matrices of the layers, as an engine that serves
        quantised weights would; the trainer's stay as they are.
    """
    engine.publish(_copy(params, engine.config, weights), version)


def rounded_to_int8(weight: Float[Array, "*n width"]) -> Float[Array, "*n width"]:
    """The nearest multiples -127 .. 127 of a scale for each vector of the last dim."""
    largest = jnp.max(jnp.abs(weight), axis=-1, keepdims=True)
    # Below tiny a scale is flushed to 0, and vectors of zeros would become NaN.
    scale = jnp.maximum(largest / 127, jnp.finfo(weight.dtype).tiny)
    return jnp.round(weight / scale) * scale


@functools.partial(jax.jit, static_argnums=(1, 2))
def _copy(
    params: dict, config: config_lib.ModelConfig, weights: config_lib.RolloutWeights
) -> dict:
    """A copy; embeddings, head, norms and routers are never rounded."""

    def one(path: tuple, weight: Array, param: layers.Param) -> Array:
        is_layer = path[0].key.startswith("layers")
        num_dims = len(param.dims) - ("L" in param.dims)
        if weights == "int8" and is_layer and num_dims > 1 and not param.is_float32:
            return rounded_to_int8(weight)
        return jnp.copy(weight)

    return jax.tree_util.tree_map_with_path(one, params, transformer.table(config))
