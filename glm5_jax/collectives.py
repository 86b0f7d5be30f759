"""What a program of one device's shards says to the others.

The model is written for the shards of one device and runs under one `jax.shard_map`
over all mesh axes (`on_shards`); these functions are its only words to other devices.
Where a mesh axis has one device, and outside of `on_shards`, they do nothing, so the
same code is the program of a laptop.

Gradients follow by transposition: of a gather a scattered sum, and the other way round.
check_vma is off: the loops of the kernels start from constants, which a check would
have to be told to vary over devices (docs/design/0007-a-local-program.md).
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
TOKENS = (*ROWS, *CONTEXT)  # ... or different tokens of a row
SHARES = ("tensor",)  # axes that hold shares of the heads and of the widths
WORDS = sharding.RULES["V"]  # axes that hold different words of the vocabulary ...
WORD_ROWS = tuple(axis for axis in WORDS if axis in ROWS)  # ... and different rows
_KEPT = ("N", "F", "V")  # dims that a device computes a share of


def on_shards(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`function` on every device's shards, if the mesh in use has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def size(axes: Sequence[str]) -> int:
    """Devices along these axes that work on one program; 1 outside of `on_shards`."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in _live(axes))


def num_devices() -> int:
    """Devices that work on one program; 1 outside of `on_shards`."""
    return size(jax.sharding.get_abstract_mesh().axis_names)


def position(axes: Sequence[str]) -> Array | int:
    """Returns which of them this device is."""
    live = _live(axes)
    return lax.axis_index(live) if live else 0


def gather(x: Array, axes: Sequence[str], dim: int) -> Array:
    """Joins the shards of a dim.

    Axis by axis, the minor one first: libtpu 0.0.51 makes an all-reduce, twice the
    traffic, of a gather over all chips of a slice at once.
    """
    for axis in reversed(_live(axes)):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def scatter_sum(x: Array, axes: Sequence[str], dim: int) -> Array:
    """Sums over devices; each keeps its share of a dim."""
    live = _live(axes)
    if not live:
        return x
    return lax.psum_scatter(x, live, scatter_dimension=dim, tiled=True)


def exchange(x: Array, axes: Sequence[str], split: int, joined: int) -> Array:
    """Keeps this device's share of a dim, and gets the others' shares of another."""
    live = _live(axes)
    if not live:
        return x
    return lax.all_to_all(x, live, split, joined, tiled=True)


def total(x: Any, axes: Sequence[str]) -> Any:
    """Sums every array of a tree over devices."""
    live = _live(axes)
    return lax.psum(x, live) if live else x


def total_of_copies(x: Array, dims: tuple[str, ...]) -> Array:
    """Sums an array with these dims over the devices that store the same part of it.

    So a gradient is summed that each device took of its share, loss / num_devices, of
    what is the same on every device: as the transpose of `on_shards` does.
    """
    cut = {axis for axes in sharding.axes_of(dims) for axis in axes}
    names = jax.sharding.get_abstract_mesh().axis_names
    return total(x, [axis for axis in names if axis not in cut])


def largest(x: Array, axes: Sequence[str]) -> Array:
    """Maximum over devices; not for gradients."""
    live = _live(axes)
    return lax.pmax(lax.stop_gradient(x), live) if live else x


def anywhere(x: Array, axes: Sequence[str]) -> Array:
    """Returns whether it is true on any device."""
    live = _live(axes)
    return lax.psum(x.astype(jnp.int32), live) > 0 if live else x


def mean(x: Array, axes: Sequence[str]) -> Array:
    """Mean over devices of what counts the same on each."""
    return total(x, axes) / size(axes)


def whole(x: Array, dims: tuple[str, ...], dtype: str | None = None) -> Array:
    """A parameter without its storage's cuts: its heads, experts and words stay cut.

    Only where E leads is it a stack of experts, which stay where they are; a router's
    columns are gathered. What is sent is sent as `dtype`.
    """
    for dim, axes in enumerate(fetched_axes(dims)):
        if size(axes) > 1:
            x = gather(x.astype(dtype or x.dtype), axes, dim)
    return x


def fetched_axes(dims: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Mesh axes along which `whole` gathers each dim of a parameter."""
    kept = (*_KEPT, "E") if dims[0] == "E" else _KEPT
    pairs = zip(dims, sharding.axes_of(dims), strict=True)
    return [() if dim in kept else axes for dim, axes in pairs]


def all_keys(x: Array, dim: int = 1) -> Array:
    """Joins the tokens of all devices of a row, in the order of the text."""
    return _in_order(gather(x, CONTEXT, dim), size(CONTEXT), dim)


def balanced(x: Array, dim: int) -> Array:
    """Reorders tokens so that devices with a part of each row have equal work.

    Of 2n pieces device i gets i and 2n - 1 - i: an early one, with few keys before it,
    and a late one. Outside of `on_shards`; `all_keys` and `in_order` undo it.
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
    """Devices that share a row, in the mesh in use."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in CONTEXT)


def _live(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns those of the axes over which this program is one of several."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    live = {name for name, n, kind in kinds if n > 1 and kind == AxisType.Manual}
    return tuple(axis for axis in axes if axis in live)
