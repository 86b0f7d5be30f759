"""The engine's copy of the parameters, made once for each published version."""

import dataclasses
import functools

import jax
from jaxtyping import Array

from glm5_jax import config as config_lib
from glm5_jax.inference import placement
from glm5_jax.model import cached, transformer
from pallas_kernels import dispatch

MAX_UNSTACKED_LAYERS = 32  # each adds compile time
_NUM_SAMPLED = 8  # numbers of a parameter


@dataclasses.dataclass(frozen=True)
class Weights:
    """The immutable parameters of a dispatch, replaced as a whole."""

    params: dict  # in their dtypes of computation
    decode_params: dict  # the same, laid out for decoding
    version: int

    @functools.cached_property
    def sample(self) -> bytes:
        """Returns the first numbers of each parameter, which differ between models."""
        leaves = jax.tree.leaves(self.params)
        mine = [leaf.addressable_shards[0].data for leaf in leaves]
        return b"".join(x.tobytes() for x in jax.device_get(_firsts(mine)))


@jax.jit
def _firsts(arrays: list[Array]) -> list[Array]:
    """Returns the first numbers of each array."""
    return [x[(0,) * (x.ndim - 1)][:_NUM_SAMPLED] for x in arrays]


def make(
    params: dict,
    version: int,
    config: config_lib.ModelConfig,
    mesh: placement.AnyMesh | None,
) -> Weights:
    """Casts and places parameters, without a copy where nothing changes.

    Args:
      params: of `transformer.table`.
      version: of the parameters.
      config: of the model.
      mesh: the engine's mesh, which must be set; None for a single device.
    """
    params = computed(params, config, mesh)
    return Weights(params, _decode_params(params, config), version)


def computed(
    params: dict, config: config_lib.ModelConfig, mesh: placement.AnyMesh | None
) -> dict:
    """Returns parameters in their dtypes of computation, sharded over the mesh."""

    def placed(params: dict) -> dict:
        if mesh is None:
            return params
        return jax.device_put(params, placement.params(params, config, mesh))

    return placed(cast_params(placed(params), config))


@functools.partial(jax.jit, static_argnames="config")
def cast_params(params: dict, config: config_lib.ModelConfig) -> dict:
    """Casts parameters to their dtypes of computation, once for all tokens.

    Matrices become config.dtype; norms, router and head weights float32.
    """
    return transformer.cast(params, config)


def _decode_params(params: dict, config: config_lib.ModelConfig) -> dict:
    """Unstacks layers on CPUs, which would copy each layer of a stack before use."""
    is_small = config.num_hidden_layers <= MAX_UNSTACKED_LAYERS
    is_alone = placement.in_use() is None
    if dispatch.platform() == "cpu" and is_small and is_alone:
        return _unstacked(params, config)
    return params


_unstacked = jax.jit(cached.unstacked, static_argnames="config")
