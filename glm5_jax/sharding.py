"""Placement: one table from logical dims to mesh axes, for parameters and activations.

A mesh axis shards at most one dim of an array: dims are read from left to right, and a
dim whose axes are taken stays whole. So D of a weight is sharded over fsdp, while an
activation (B, T, D) spends fsdp on its batch.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    "B": ("data", "fsdp", "expert"),
    "T": ("context",),
    "E": ("expert",),
    "D": ("fsdp",),
    "D+D": ("fsdp",),
    "V": ("tensor",),
    "N": ("tensor",),
    "F": ("tensor",),
}


def spec(dims: tuple[str, ...]) -> PartitionSpec:
    """Mesh axes of an array with these logical dims."""
    taken: set[str] = set()
    parts = []
    for dim in dims:
        axes = tuple(a for a in RULES.get(dim, ()) if a not in taken)
        taken.update(axes)
        parts.append(axes or None)
    return PartitionSpec(*parts)


def shardings(dims: Any, mesh: Mesh) -> Any:
    """A NamedSharding for each tuple of dims in a tree."""
    return jax.tree.map(lambda d: NamedSharding(mesh, spec(d)), dims, is_leaf=_is_dims)


def like_params(tree: Any, param_shardings: Any, mesh: Mesh) -> Any:
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
