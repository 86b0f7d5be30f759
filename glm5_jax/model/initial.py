"""Initial values of parameters: as sharded as they are kept, the same on every mesh.

Random bits are a function of the key and of an element's place in its array
(jax_threefry_partitionable), so each device draws its own part alone. That holds for an
array that is drawn in the shape that it is kept in; what is drawn as one flat array and
cut afterwards exists whole on every device. A draw takes a second to compile, so small
arrays are drawn together and large ones alone.
"""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from glm5_jax import config as config_lib
from glm5_jax import sharding
from glm5_jax.model import layers

LARGE = 2**21  # elements: 8 MiB, of which a device may have some copies


def values(
    params: Iterable[layers.Param], config: config_lib.ModelConfig, key: Array
) -> list[Array]:
    """An array for each entry of the table of parameters, in their order."""
    params = list(params)
    out: dict[int, Array] = {
        i: jnp.full(param.shape, param.fill, param.dtype(config))
        for i, param in enumerate(params)
        if param.fill is not None
    }
    with jax.threefry_partitionable(True):
        for number, pack in enumerate(_packs(params)):
            # The first has the key itself: small models are one pack.
            own = jax.random.fold_in(key, number) if number else key
            drawn = _normals([params[i].shape for i in pack], own)
            for i, normal in zip(pack, drawn, strict=True):
                value = config.initializer_range * normal
                out[i] = value.astype(params[i].dtype(config))
    return [out[i] for i in range(len(params))]


def _packs(params: list[layers.Param]) -> list[list[int]]:
    """Groups what is drawn at once: large ones alone, small ones up to as many."""
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
    """Standard normals, float32."""
    if len(shapes) == 1:
        return [jax.random.normal(key, shapes[0])]
    sizes = [math.prod(shape) for shape in shapes]
    # Every device makes the few of a pack whole: to cut them otherwise is to send them.
    flat = sharding.constrained(jax.random.normal(key, (sum(sizes),)), ("M",))
    out, start = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        out.append(flat[start : start + size].reshape(shape))
        start += size
    return out
