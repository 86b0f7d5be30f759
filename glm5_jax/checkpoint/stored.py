"""Writes the arrays of a step in chunks, and reads them onto any mesh.

Orbax makes one chunk of each device's part of an array, up to 2 GiB, and reading one
element decodes its whole chunk. Parameters are therefore cut further, into layers and
experts, which an export or a restore onto another mesh reads one by one.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from glm5_jax.checkpoint import leaves, same_shapes, step_folder

PyTree = Any

_CHUNK_BYTES = 2**26  # at most, of a parameter


def to_save(state: PyTree, metadata: dict[str, Any]) -> ocp.args.Composite:
    """Returns what Orbax saves: parameters apart, to be read and verified alone."""
    rest = {name: tree for name, tree in state.items() if name != "params"}
    params = {"params": state["params"]}
    cuts = jax.tree_util.tree_map_with_path(_cut, params)
    parts: dict[str, Any] = {
        step_folder.PARAMS: ocp.args.PyTreeSave(params, cuts),
        step_folder.METADATA: ocp.args.JsonSave(metadata),
    }
    if rest:
        parts[step_folder.STATE] = ocp.args.PyTreeSave(rest)
    return ocp.args.Composite(**parts)


def read(folder: epath.Path, abstract: PyTree, what: str) -> PyTree:
    """Reads those leaves of a step's state that `abstract` has.

    Args:
        folder: of the step.
        abstract: dict with "params": shapes, types and shardings, or such arrays.
        what: subject of messages.

    Raises:
        InputError: the step has other leaves or shapes.
    """
    rest = {name: tree for name, tree in abstract.items() if name != "params"}
    params = {"params": abstract["params"]}
    if not (folder / step_folder.PARAMS).exists():  # a step from before manifests
        return _read_part(folder / step_folder.STATE, abstract, what)
    out = _read_part(folder / step_folder.PARAMS, params, what)
    if rest:
        out |= _read_part(folder / step_folder.STATE, rest, what)
    return out


def require_shapes(folder: epath.Path, abstract: PyTree, what: str) -> None:
    """Checks that `read` would find the parameters, without reading any.

    Args:
        folder: of the step.
        abstract: the parameters' shapes.
        what: subject of messages.

    Raises:
        InputError: the step has other leaves or shapes.
    """
    path = folder / step_folder.PARAMS
    if not path.exists():  # a step from before manifests
        path = folder / step_folder.STATE
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        _require_shapes(handler, path, {"params": abstract}, what)


def stack_axes(path: leaves.Path, shape: Sequence[int], itemsize: int) -> list[int]:
    """Returns the axes (layers, experts) along which to cut a parameter into ones.

    By default Orbax halves the largest dim, which puts every expert in every chunk.
    """
    axes, size = [], math.prod(shape) * itemsize
    for axis in range(leaves.stack_depth(path)):
        if size > _CHUNK_BYTES:
            axes.append(axis)
            size //= shape[axis]
    return axes


def _cut(path: tuple, array: jax.Array) -> ocp.SaveArgs:
    """Returns Orbax's settings for cutting a device's part of a parameter."""
    names = tuple(key.key for key in path)
    # By the global shape: reading an expert touches the chunks of all devices.
    axes = stack_axes(names, array.shape, array.dtype.itemsize)
    return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=tuple(axes))


def _read_part(path: epath.Path, abstract: PyTree, what: str) -> PyTree:
    abstract = jax.tree.map(_with_sharding, abstract)
    # Without a Checkpointer: if one process could not read, the others would wait for
    # it at the end of the restore.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        _require_shapes(handler, path, abstract, what)
        arguments = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        return handler.restore(path, args=arguments)


def _require_shapes(
    handler: ocp.PyTreeCheckpointHandler, path: epath.Path, abstract: PyTree, what: str
) -> None:
    wanted, name = _shapes(abstract), f"the {what} in {path.parent}"
    if not path.exists():  # a converted model has no such part
        same_shapes.require({}, wanted, name)
    if not ocp.utils.is_checkpoint_finalized(path):
        raise ValueError(f"{path} is incomplete: its save did not finish.")
    stored = _shapes(handler.metadata(path).tree)
    tops = {leaf.split(".")[0] for leaf in wanted}
    stored = {k: v for k, v in stored.items() if k.split(".")[0] in tops}
    same_shapes.require(stored, wanted, name)


def _with_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(
        jax.local_devices()[0]
    )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns shapes by dotted path; as on disk, named tuples look like dicts."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = jax.tree_util.keystr
    return {name(path, simple=True, separator="."): tuple(x.shape) for path, x in flat}
