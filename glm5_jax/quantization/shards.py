"""Shards quantized matrices: scales lie with the codes that they belong to."""

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax.quantization import leaf


def specs(params: Any, dims: Any) -> Any:
    """Returns a PartitionSpec for each array of a tree that has quantized matrices.

    Args:
      params: of the model, or their shapes.
      dims: logical dims of each parameter, as a tree.
    """

    def one(dims: tuple[str, ...], x: Any) -> Any:
        own = sharding.spec(dims)
        if not leaf.is_quantized(x):
            return own
        blocks = _blocks(x, dims)
        parts = [
            None if b == leaf.WHOLE else p for p, b in zip(own, blocks, strict=True)
        ]
        return leaf.Quantized(own, PartitionSpec(*parts), x.layout)

    return jax.tree.map(one, dims, params, is_leaf=_is_dims)


def shardings(params: Any, dims: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns a NamedSharding for each array of a tree that has quantized matrices.

    Raises:
      InputError: an axis of the mesh would cut through blocks that share a scale.
    """
    jax.tree.map(
        lambda d, x: _require_whole_blocks(d, x, mesh), dims, params, is_leaf=_is_dims
    )
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs(params, dims),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def fetched(weights: leaf.Quantized, dims: tuple[str, ...]) -> leaf.Quantized:
    """Returns a matrix gathered over its storage axes; see `collectives.fetched`."""
    values, scales = weights.values, weights.scales
    blocks = _blocks(weights, dims)
    for dim, axes in enumerate(collectives.fetched_axes(dims)):
        if collectives.size(axes) > 1:
            values = collectives.gather(values, axes, dim)
            if blocks[dim] != leaf.WHOLE:
                scales = collectives.gather(scales, axes, dim)
    return leaf.Quantized(values, scales, weights.layout)


def _require_whole_blocks(
    dims: tuple[str, ...], x: Any, mesh: Mesh | AbstractMesh
) -> None:
    """Checks that every shard of a matrix has whole blocks."""
    if not leaf.is_quantized(x):
        return
    units = [*_blocks(x, dims)]
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
