"""Reads the arrays of a step, as much of them as is asked for, onto any mesh."""

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from glm5_jax.checkpoint import same_shapes, step_folder

PyTree = Any


def read(folder: epath.Path, abstract: PyTree, what: str) -> PyTree:
    """Reads those leaves of a step's state that `abstract` has.

    Args:
        folder: of the step.
        abstract: dict with "params" of shapes, types and shardings; arrays will do.
        what: it is, for messages.

    Raises:
        InputError: there are other leaves, or they have other shapes.
    """
    rest = {name: tree for name, tree in abstract.items() if name != "params"}
    params = {"params": abstract["params"]}
    if not (folder / step_folder.PARAMS).exists():  # before there were manifests
        return _read_part(folder / step_folder.STATE, abstract, what)
    out = _read_part(folder / step_folder.PARAMS, params, what)
    if rest:
        out |= _read_part(folder / step_folder.STATE, rest, what)
    return out


def _read_part(path: epath.Path, abstract: PyTree, what: str) -> PyTree:
    abstract = jax.tree.map(_with_sharding, abstract)
    wanted, name = _shapes(abstract), f"the {what} in {path.parent}"
    if not path.exists():  # of a model alone, converted
        same_shapes.require({}, wanted, name)
    if not ocp.utils.is_checkpoint_finalized(path):
        raise ValueError(f"{path} was not finished.")
    # Not by a Checkpointer: where one process cannot read, the others would wait for it
    # at the end of its restore.
    handler = ocp.PyTreeCheckpointHandler()
    try:
        stored = _shapes(handler.metadata(path).tree)
        tops = {leaf.split(".")[0] for leaf in wanted}
        stored = {k: v for k, v in stored.items() if k.split(".")[0] in tops}
        same_shapes.require(stored, wanted, name)
        arguments = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        return handler.restore(path, args=arguments)
    finally:
        handler.close()


def _with_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(
        jax.local_devices()[0]
    )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Shape by dotted path; named tuples and dicts look the same, as on disk."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = jax.tree_util.keystr
    return {
        name(path, simple=True, separator="."): tuple(x.shape) for path, x in leaves
    }
