"""Shards arrays over a mesh: one table from logical dims to mesh axes.

A mesh axis shards at most one dim of an array. The dims take their axes in the order of
the table; a dim whose axes are all taken is not sharded. So D is sharded over fsdp,
context and expert in a matrix, over fsdp and context in a stack of experts, and not at
all in an activation (B, T, D). A vector is replicated: gathering it costs more than
keeping it.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    "B": ("data", "fsdp", "expert"),
    "T": ("context",),
    "E": ("expert",),
    "V": ("tensor", "expert"),
    "N": ("tensor",),
    "F": ("tensor",),
    "D": ("fsdp", "context", "expert"),
    "D+D": ("fsdp", "context", "expert"),
    "Q": ("fsdp", "context", "expert"),
    "C": ("fsdp", "context"),  # 512 in GLM-5: fewer than all devices
}


def spec(dims: tuple[str, ...]) -> PartitionSpec:
    """Returns the PartitionSpec of an array with these logical dims."""
    return PartitionSpec(*(axes or None for axes in axes_of(dims)))


def axes_of(dims: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns the mesh axes that shard each dim of an array."""
    taken: set[str] = set()
    parts: list[tuple[str, ...]] = [()] * len(dims)
    order = [dim for dim in RULES if dim in dims]
    if len([dim for dim in dims if dim != "L"]) < 2:
        order = []
    for dim in order:
        axes = tuple(axis for axis in RULES[dim] if axis not in taken)
        taken.update(axes)
        parts[dims.index(dim)] = axes
    return parts


def specs(dims: Any) -> Any:
    """Returns a PartitionSpec for each tuple of dims in a tree."""
    return jax.tree.map(spec, dims, is_leaf=_is_dims)


def shardings(dims: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns a NamedSharding for each tuple of dims in a tree."""
    return jax.tree.map(lambda d: NamedSharding(mesh, spec(d)), dims, is_leaf=_is_dims)


def constrained(tree: Any, dims: Any) -> Any:
    """Constrains arrays of a jitted program to the sharding of their dims."""
    if jax.sharding.get_abstract_mesh().size <= 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, specs(dims))


def _is_dims(node: Any) -> bool:
    """A plain tuple: a named one, if empty, is a part of an optimizer's state."""
    return type(node) is tuple and all(isinstance(dim, str) for dim in node)
