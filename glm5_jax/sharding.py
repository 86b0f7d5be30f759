"""Placement: one table from logical dims to mesh axes, for parameters and activations.

A mesh axis shards at most one dim of an array: the dims take their axes in the order of
the table, and one that finds all of its axes taken stays whole. So D of a matrix is
sharded over fsdp and expert, of a stack of experts over fsdp alone, and not at all in
an activation (B, T, D). A vector is whole everywhere: it costs more to gather than to
keep.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from glm5_jax import config as config_lib

AXES = ("data", "fsdp", "expert", "tensor", "context")
RULES: dict[str, tuple[str, ...]] = {
    "B": ("data", "fsdp", "expert"),
    "T": ("context",),
    "E": ("expert",),
    "V": ("tensor", "expert"),
    "N": ("tensor",),
    "F": ("tensor",),
    "D": ("fsdp", "expert"),
    "D+D": ("fsdp", "expert"),
    "Q": ("fsdp", "expert"),
    "C": ("fsdp",),  # 512 in GLM-5: fewer than the devices of fsdp x expert
}


def make_mesh(config: config_lib.MeshConfig) -> Mesh:
    """The mesh of this machine's devices, axis types Auto.

    Raises:
      InputError: the axes' product is not the number of devices.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    num_devices = jax.device_count()
    others = int(np.prod(sizes[1:]))
    if sizes[0] == -1:
        sizes[0] = max(num_devices // others, 1)
    if int(np.prod(sizes)) != num_devices:
        axes = " x ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True))
        raise config_lib.InputError(
            f"mesh needs as many devices as there are: {axes} on {num_devices} "
            f"devices; set the axes so that their product is {num_devices}, or "
            f"mesh.data=-1 and the others to divisors of it."
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def spec(dims: tuple[str, ...]) -> PartitionSpec:
    """Where an array with these logical dims lies."""
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
