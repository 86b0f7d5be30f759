"""Collectives of the per-device program: gathers, sums and exchanges over mesh axes.

The model computes on the shards of one device, under one `jax.shard_map` over all mesh
axes (`on_shards`), and communicates by these functions alone. Over an axis of one
device, and outside `on_shards`, they are no-ops, so that a laptop runs the same code.

Gradients follow by transposition: a gather's is a scattered sum, and the reverse.
check_vma is off: the kernels' loops start from constants, which that check would need
to be told to vary over devices (docs/design/0007-a-local-program.md).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array

from glm5_jax import sharding

ROWS = sharding.RULES["B"]  # axes that hold different rows of a batch
CONTEXT = sharding.RULES["T"]
TOKENS = (*ROWS, *CONTEXT)  # axes that hold different tokens of a batch
SHARES = ("tensor",)  # axes that shard heads and feed-forward widths
WORDS = sharding.RULES["V"]  # axes that shard the vocabulary
WORD_ROWS = tuple(axis for axis in WORDS if axis in ROWS)  # those of different rows
_KEPT = ("N", "F", "V")  # dims that stay sharded while a device computes


def on_shards(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Maps a function over the devices' shards, if the mesh has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def size(axes: Sequence[str]) -> int:
    """Returns the number of devices along these axes; 1 outside `on_shards`."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in _live(axes))


def num_devices() -> int:
    """Returns the number of devices of the program; 1 outside `on_shards`."""
    return size(jax.sharding.get_abstract_mesh().axis_names)


def index(axes: Sequence[str]) -> Array | int:
    """Returns this device's index along these axes."""
    live = _live(axes)
    return lax.axis_index(live) if live else 0


def own_part(x: Array, axes: Sequence[str], length: int) -> Array:
    """Returns the `length` entries of a whole array that are this device's."""
    return lax.dynamic_slice_in_dim(x, index(axes) * length, length)


def gather(x: Array, axes: Sequence[str], dim: int) -> Array:
    """Joins the shards of a dim.

    It gathers over one axis after the other, the minor one first: libtpu 0.0.51 turns a
    gather over all chips of a slice into an all-reduce, which has twice the traffic.
    """
    for axis in reversed(_live(axes)):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def scatter_sum(x: Array, axes: Sequence[str], dim: int) -> Array:
    """Sums over devices, and keeps this device's shard of a dim."""
    live = _live(axes)
    if not live:
        return x
    return lax.psum_scatter(x, live, scatter_dimension=dim, tiled=True)


def exchange(x: Array, axes: Sequence[str], split: int, joined: int) -> Array:
    """Shards the dim `split` and joins the shards of the dim `joined`: all-to-all."""
    live = _live(axes)
    if not live:
        return x
    return lax.all_to_all(x, live, split, joined, tiled=True)


def total(x: Any, axes: Sequence[str]) -> Any:
    """Sums every array of a tree over devices."""
    live = _live(axes)
    return lax.psum(x, live) if live else x


def total_of_copies(x: Array, dims: tuple[str, ...]) -> Array:
    """Sums an array with these dims over the devices that store the same shard.

    It sums gradients that each device took of its share, loss / num_devices, of a loss
    that is equal on all devices; the transpose of `on_shards` does the same.
    """
    cut = {axis for axes in sharding.axes_of(dims) for axis in axes}
    names = jax.sharding.get_abstract_mesh().axis_names
    return total(x, [axis for axis in names if axis not in cut])


def largest(x: Array, axes: Sequence[str]) -> Array:
    """Returns the maximum over devices, without a gradient."""
    live = _live(axes)
    return lax.pmax(lax.stop_gradient(x), live) if live else x


def anywhere(x: Array, axes: Sequence[str]) -> Array:
    """Returns whether a condition is true on any device."""
    live = _live(axes)
    return lax.psum(x.astype(jnp.int32), live) > 0 if live else x


def mean(x: Array, axes: Sequence[str]) -> Array:
    """Returns the mean over devices, each with equal weight."""
    return total(x, axes) / size(axes)


def fetched(x: Array, dims: tuple[str, ...], dtype: str | None = None) -> Array:
    """Returns a parameter gathered over its storage axes, sent as `dtype`.

    Heads, feed-forward widths and words stay sharded, and so do experts where E is the
    first dim; a router's columns, also E, are gathered.
    """
    for dim, axes in enumerate(fetched_axes(dims)):
        if size(axes) > 1:
            x = gather(x.astype(dtype or x.dtype), axes, dim)
    return x


def fetched_axes(dims: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the mesh axes over which `fetched` gathers each dim of a parameter."""
    kept = (*_KEPT, "E") if dims[0] == "E" else _KEPT
    pairs = zip(dims, sharding.axes_of(dims), strict=True)
    return [() if dim in kept else axes for dim, axes in pairs]


def all_keys(x: Array, dim: int = 1) -> Array:
    """Gathers the tokens of a row, in the order of the text."""
    return _in_order(gather(x, CONTEXT, dim), size(CONTEXT), dim)


def balanced(x: Array, dim: int) -> Array:
    """Reorders the tokens of rows that n devices share, for equal work.

    Device i gets pieces i and 2n - 1 - i of 2n: an early one, which attends to few
    keys, and a late one. Call it outside `on_shards`; `all_keys` and `in_order` undo
    it.
    """
    num = _context_size()
    if num == 1:
        return x
    x = jnp.moveaxis(x, dim, 0)
    x = x.reshape(2, num, -1, *x.shape[1:])
    x = jnp.stack([x[0], x[1, ::-1]], axis=1)
    return jnp.moveaxis(x.reshape(-1, *x.shape[3:]), 0, dim)


def in_order(x: Array, dim: int) -> Array:
    """Undoes `balanced`."""
    return _in_order(x, _context_size(), dim)


def _in_order(x: Array, num: int, dim: int) -> Array:
    if num == 1:
        return x
    x = jnp.moveaxis(x, dim, 0)
    x = x.reshape(num, 2, -1, *x.shape[1:])
    x = jnp.concatenate([x[:, 0], x[::-1, 1]])
    return jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 0, dim)


def _context_size() -> int:
    """Returns the number of devices that share a row, in the mesh in use."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in CONTEXT)


def _live(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the axes over which the program is mapped on several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    live = {name for name, n, kind in kinds if n > 1 and kind == AxisType.Manual}
    return tuple(axis for axis in axes if axis in live)
