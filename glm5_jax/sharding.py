"""Placement: one table from logical dims to mesh axes, for parameters and activations.

A mesh axis shards at most one dim of an array: the dims take their axes in the order of
the table, and one that finds all of its axes taken stays whole. So D of a matrix is
sharded over fsdp, context and expert, of a stack of experts over the first two, and not
at all in an activation (B, T, D). A vector is whole everywhere: it costs more to gather
than to keep.
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
    "C": ("fsdp", "context"),  # 512 in GLM-5: no more than such devices
}


def spec(dims: tuple[str, ...]) -> PartitionSpec:
    """Returns where an array with these logical dims lies."""
    return PartitionSpec(*(axes or None for axes in axes_of(dims)))


def axes_of(dims: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Mesh axes of each dim of an array."""
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
    """A PartitionSpec for each tuple of dims in a tree."""
    return jax.tree.map(spec, dims, is_leaf=_is_dims)


def shardings(dims: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A NamedSharding for each tuple of dims in a tree."""
    return jax.tree.map(lambda d: NamedSharding(mesh, spec(d)), dims, is_leaf=_is_dims)


def constrained(tree: Any, dims: Any) -> Any:
    """Arrays of a jitted program, placed by their dims on the mesh in use."""
    if jax.sharding.get_abstract_mesh().size <= 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, specs(dims))


def like_params(tree: Any, param_shardings: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shardings of a tree in which some leaves mirror parameters (optimizer states).

    A leaf that sits under the same chain of dict keys as a parameter is placed like
    it; any other is replicated.
    """
    flat = jax.tree_util.tree_flatten_with_path(param_shardings)[0]
    by_path = {_dict_keys(path): value for path, value in flat}
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree_util.tree_map_with_path(
        lambda path, _: by_path.get(_dict_keys(path), everywhere), tree
    )


def _is_dims(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(d, str) for d in node)


def _dict_keys(path: tuple) -> tuple[str, ...]:
    keys = jax.tree_util.DictKey
    return tuple(k.key for k in path if isinstance(k, keys) and k.key not in _LABELS)


_LABELS = ("muon", "adamw", "adamw_no_decay", "frozen")  # of the optimizer's branches
