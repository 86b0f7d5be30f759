"""Draws initial parameters: each device its own shard, the same values on any mesh.

Random bits depend only on the key and an element's place in its array
(jax_threefry_partitionable), so each device can draw its shard alone. This needs an
array drawn in its final shape: one drawn flat and cut afterwards would exist whole on
every device. A draw takes a second to compile, so small arrays are drawn together, and
only large ones one by one.
"""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from glm5_jax import config as config_lib
from glm5_jax import sharding
from glm5_jax.model import layers

LARGE = 2**21  # elements: 8 MiB, small enough for some copies on a device


def values(
    params: Iterable[layers.Param], config: config_lib.ModelConfig, key: Array
) -> list[Array]:
    """Returns an array for each entry of the parameter table, in its order."""
    params = list(params)
    out: dict[int, Array] = {
        i: _filled(param, config)
        for i, param in enumerate(params)
        if param.fill is not None
    }
    with jax.threefry_partitionable(True):
        for number, pack in enumerate(_packs(params)):
            # The first pack uses the key itself: small models are a single pack.
            own = jax.random.fold_in(key, number) if number else key
            drawn = _normals([params[i].shape for i in pack], own)
            for i, normal in zip(pack, drawn, strict=True):
                value = config.initializer_range * normal
                out[i] = value.astype(params[i].dtype(config))
    return [out[i] for i in range(len(params))]


def _filled(param: layers.Param, config: config_lib.ModelConfig) -> Array:
    """Returns a constant array."""
    if isinstance(param.fill, tuple):
        row = jnp.asarray(param.fill, param.dtype(config))
        return jnp.broadcast_to(row, param.shape)
    assert param.fill is not None
    return jnp.full(param.shape, param.fill, param.dtype(config))


def _packs(params: list[layers.Param]) -> list[list[int]]:
    """Groups arrays to draw together: large ones alone, small ones up to LARGE."""
    packs: list[list[int]] = [[]]
    alone: list[list[int]] = []
    size = 0
    for i, param in enumerate(params):
        if param.fill is not None:
            continue
        own = math.prod(param.shape)
        if own > LARGE:
            alone.append([i])
            continue
        if size + own > LARGE:
            packs.append([])
            size = 0
        packs[-1].append(i)
        size += own
    return [*packs, *alone]


def _normals(shapes: list[tuple[int, ...]], key: Array) -> list[Array]:
    """Draws standard normals, float32."""
    if len(shapes) == 1:
        return [jax.random.normal(key, shapes[0])]
    sizes = [math.prod(shape) for shape in shapes]
    # Every device draws a pack whole, since resharding would send it.
    flat = sharding.constrained(jax.random.normal(key, (sum(sizes),)), ("M",))
    out, start = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        out.append(flat[start : start + size].reshape(shape))
        start += size
    return out
