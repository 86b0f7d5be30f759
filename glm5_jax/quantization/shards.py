"""Shards quantized matrices: scales lie with the codes that they belong to.

Where devices share a block of a dim over which matrices are gathered, each has the
scales of the whole dim, which are few, and takes its own (`local`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax.quantization import leaf


def specs(params: Any, dims: Any, mesh: Mesh | AbstractMesh | None = None) -> Any:
    """Returns a PartitionSpec for each array of a tree that has quantized matrices.

    Args:
      params: of the model, or their shapes.
      dims: logical dims of each parameter, as a tree.
      mesh: of the devices; None for the mesh in use.
    """
    sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape

    def one(dims: tuple[str, ...], x: Any) -> Any:
        own = sharding.spec(dims)
        if not leaf.is_quantized(x):
            return own
        axes = sharding.axes_of(dims)
        counts = (math.prod(sizes.get(axis, 1) for axis in cut) for cut in axes)
        each = zip(own, _blocks(x, dims), x.shape, counts, strict=True)
        parts = [
            None if block == leaf.WHOLE or size % (count * block) else part
            for part, block, size, count in each
        ]
        return leaf.Quantized(own, PartitionSpec(*parts), x.layout)

    return jax.tree.map(one, dims, params, is_leaf=_is_dims)


def shardings(params: Any, dims: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns a NamedSharding for each array of a tree that has quantized matrices.

    Raises:
      InputError: an axis of the mesh would cut through a byte, or through a block of a
        dim that stays cut while a device computes.
    """
    jax.tree.map(
        lambda d, x: _require_whole_blocks(d, x, mesh), dims, params, is_leaf=_is_dims
    )
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs(params, dims, mesh),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def fetched(weights: leaf.Quantized, dims: tuple[str, ...]) -> leaf.Quantized:
    """Returns a matrix gathered over its storage axes; see `collectives.fetched`."""
    values, scales = weights.values, weights.scales
    blocks, sizes = _blocks(weights, dims), weights.shape
    for dim, axes in enumerate(collectives.fetched_axes(dims)):
        if collectives.size(axes) > 1:
            values = collectives.gather(values, axes, dim)
            if blocks[dim] != leaf.WHOLE and sizes[dim] % blocks[dim] == 0:
                scales = collectives.gather(scales, axes, dim)
    return leaf.Quantized(values, scales, weights.layout)


def local(weights: leaf.Quantized, dims: tuple[str, ...]) -> leaf.Quantized:
    """Returns this device's part of a matrix with the scales of that part alone.

    Where devices share a block, their parts have smaller ones, with the same scales.
    """
    blocks, scales = [*_blocks(weights, dims)], weights.scales
    for dim, axes in enumerate(collectives.fetched_axes(dims)):
        size, block = weights.shape[dim], blocks[dim]
        if collectives.size(axes) == 1 or block == leaf.WHOLE or size % block == 0:
            continue
        blocks[dim] = math.gcd(size, block)
        scales = jnp.repeat(scales, block // blocks[dim], axis=dim)
        count = size // blocks[dim]
        scales = lax.dynamic_slice_in_dim(
            scales, collectives.index(axes) * count, count, dim
        )
    own = tuple(blocks[len(dims) - len(weights.layout.blocks) :])
    layout = dataclasses.replace(weights.layout, blocks=own)
    return leaf.Quantized(weights.values, scales, layout)


def _require_whole_blocks(
    dims: tuple[str, ...], x: Any, mesh: Mesh | AbstractMesh
) -> None:
    """Checks that every shard of a matrix has whole bytes, and blocks where it must."""
    if not leaf.is_quantized(x):
        return
    units = [
        1 if fetched else block
        for block, fetched in zip(
            _blocks(x, dims), collectives.fetched_axes(dims), strict=True
        )
    ]
    packed, reason = x.layout.packed_axis, "scale"
    if packed is not None and units[packed] < 2:
        units[packed], reason = 2, "byte"
    each = zip(dims, x.shape, sharding.axes_of(dims), units, strict=True)
    for dim, size, axes, unit in each:
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if unit > 1 and parts > 1 and size % (parts * unit):
            raise config_lib.InputError(
                f"{parts} devices of the axes {' * '.join(axes)} cannot share dim "
                f"{dim} of {size}, in which every {unit} weights have one {reason}; "
                f"give fewer devices to these axes, or leave the weights unquantized."
            )


def _blocks(x: leaf.Quantized, dims: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the blocks of all dims, stacks included."""
    blocks = x.layout.blocks
    return (1,) * (len(dims) - len(blocks)) + blocks


def _is_dims(node: Any) -> bool:
    return type(node) is tuple and all(isinstance(dim, str) for dim in node)
