"""Reads and writes a step folder in windows, for models larger than memory.

Reading uses TensorStore. Writing goes through Orbax with a TypeHandler of ours, which
writes windows instead of an array in memory, as plain zarr: one file a chunk, since
every commit of OCDBT rewrites part of an index. Names, metadata and the final rename
are Orbax's, so `manager` restores such a step like any other.
"""

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
import tqdm
from absl import logging
from etils import epath

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.checkpoint import manifest, same_shapes, step_folder

_TREE = "params"  # top-level name in the item PARAMS
_CACHE_BYTES = 2**28  # of decoded chunks; more if a chunk is larger
_PLACING_BYTES = 2**26  # the same, while devices' parts are read one after another


class StepLeaf(leaves_lib.Leaf):
    """One parameter of a step."""

    def __init__(self, store: tensorstore.TensorStore, lacks: str) -> None:
        """Takes an open TensorStore array, and the words for one that is gone."""
        self._store, self._lacks = store, lacks
        self.shape, self.dtype = tuple(store.shape), store.dtype.numpy_dtype

    @property
    def chunk_bytes(self) -> int:
        """Returns the bytes that must be decoded to read one element."""
        chunk = self._store.chunk_layout.read_chunk.shape or ()
        sizes = [min(c or n, n) for c, n in zip(chunk, self.shape, strict=True)]
        return math.prod(sizes) * self.dtype.itemsize

    def read(self, window: leaves_lib.Window) -> np.ndarray:
        """Reads the window, decoding the chunks that it touches.

        Raises:
          DamagedError: a chunk is gone.
        """
        with _all_there(self._lacks):
            return self._store[window].read().result()


def open_params(
    folder: epath.PathLike, abstract_params: dict, least_cache: int | None = None
) -> dict[leaves_lib.Path, StepLeaf]:
    """Opens the parameters of a step folder.

    Args:
      folder: of a step.
      abstract_params: the tree, with anything that has a shape as leaves.
      least_cache: bytes of decoded chunks to keep, more if a tensor or two chunks are
        larger; None is a quarter of a GiB.

    Raises:
      InputError: the step is of another model.
      DamagedError: a parameter is gone.
    """
    least = _CACHE_BYTES if least_cache is None else least_cache
    state = epath.Path(folder) / step_folder.PARAMS
    if not state.exists():  # a step from before manifests
        state = epath.Path(folder) / step_folder.STATE
    if state.exists() and not ocp.utils.is_checkpoint_finalized(state):
        raise ValueError(f"{state} is incomplete: its save did not finish.")
    metadata = json.loads((state / "_METADATA").read_text())
    stored = (
        tuple(str(key["key"]) for key in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
    )
    names = [path[1:] for path in stored if path[0] == _TREE]
    wanted, _ = leaves_lib.flatten(abstract_params)
    is_ocdbt = (state / "manifest.ocdbt").exists()
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"

    def open_all(cache_bytes: int) -> dict[leaves_lib.Path, StepLeaf]:
        context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": cache_bytes}}
        )
        opening = {
            path: tensorstore.open(
                {
                    "driver": driver,
                    "kvstore": _key(state, path, is_ocdbt),
                    "fill_missing_data_reads": False,  # zeros, where a step is gone
                },
                context=context,
                read=True,
            )
            for path in names
        }
        found = {}
        for path, store in opening.items():
            lacks = f"{folder} lacks files of {'.'.join(path)!r}"
            with _all_there(lacks):
                found[path] = StepLeaf(store.result(), lacks)
        return found

    found = open_all(least)
    theirs = {path: leaf.shape for path, leaf in found.items()}
    ours = {path: tuple(leaf.shape) for path, leaf in wanted.items()}
    same_shapes.require(_dotted(theirs), _dotted(ours), f"the model in {folder}")
    return open_all(max(least, *itertools.starmap(_needed_cache, found.items())))


def read_params(folder: epath.PathLike, abstract_params: dict) -> dict:
    """Reads the parameters of a step folder, each process the parts of its own devices.

    Args:
      folder: of a step.
      abstract_params: shapes, types and shardings of the result; a leaf without a
        sharding comes onto the first device.

    Raises:
      InputError: the step is of another model.
    """
    opened = open_params(folder, abstract_params, _PLACING_BYTES)
    wanted, treedef = leaves_lib.flatten(abstract_params)
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    arrays = [
        leaves_lib.place(opened[path], like.sharding or first, like.dtype)
        for path, like in wanted.items()
    ]
    return jax.tree.unflatten(treedef, arrays)


def save_params(folder: epath.PathLike, params: dict, metadata: dict) -> None:
    """Writes a step folder with its manifest, window by window.

    Args:
      folder: of the step, to make: RUN/checkpoints/STEP.
      params: tree with a `leaves.Leaf` for each parameter.
      metadata: of the step.

    Raises:
      InputError: a parameter holds a NaN or an infinity.
    """
    leaves = jax.tree.leaves(params)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    kinds = {type(leaf) for leaf in leaves}
    with (
        _quiet(),
        tqdm.tqdm(
            total=size, unit="B", unit_scale=True, desc="writing", disable=None
        ) as bar,
    ):
        handler = _WindowHandler(bar)
        registry = ocp.type_handlers.create_type_handler_registry(
            *((kind, handler) for kind in kinds)
        )
        windows = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, type_handler_registry=registry
        )
        composite = ocp.CompositeCheckpointHandler(
            params=windows, metadata=ocp.JsonCheckpointHandler()
        )
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave({_TREE: params}),
            metadata=ocp.args.JsonSave(metadata),
        )
        path = step_folder.absolute(folder)
        with ocp.Checkpointer(composite) as checkpointer:
            checkpointer.save(path, args=items)
    manifest.seal(path)


def _needed_cache(path: leaves_lib.Path, leaf: StepLeaf) -> int:
    """Returns the cache that keeps chunks from being decoded again for each window.

    Windows of a tensor can cross all its chunks if a mesh cut another dim.
    """
    tensor = math.prod(leaf.shape[leaves_lib.stack_depth(path) :])
    return max(tensor * leaf.dtype.itemsize, 2 * leaf.chunk_bytes)


@contextlib.contextmanager
def _all_there(lacks: str) -> Iterator[None]:
    """Raises a DamagedError that begins so where TensorStore finds a file missing."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("NOT_FOUND"):
            raise
        raise config_lib.DamagedError(
            f"{lacks}: perhaps its run deleted the step, or set it aside in a rollback,"
            f" while it was read. Read a step that stays: a newer one, a copy of its "
            f"folder, or raise the run's checkpoints_to_keep."
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax's warning that there is no OCDBT to merge: none is wanted."""
    logger = logging.get_absl_logger()
    level = logger.level  # not absl's verbosity, which may be unset
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


class _WindowHandler(ocp.type_handlers.TypeHandler):
    """Writes `Leaf` objects so that Orbax can restore them as arrays."""

    def __init__(self, bar: tqdm.tqdm) -> None:
        self._bar = bar

    def typestr(self) -> str:
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("it only writes")

    async def deserialize(
        self, infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        raise NotImplementedError("it only writes")

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        # The future's thread waits until Orbax has made the folders.
        return [
            ocp.future.CommitFutureAwaitingContractedSignals(
                self._write_all(values, infos), name="windows"
            )
        ]

    async def _write_all(
        self, values: Sequence[leaves_lib.Leaf], infos: Sequence[Any]
    ) -> None:
        for leaf, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            await self._write(leaf, info)

    async def _write(self, leaf: leaves_lib.Leaf, info: Any) -> None:
        chunk = leaves_lib.chunk_shape(
            leaf.shape, leaf.dtype.itemsize, leaf.cuts, leaves_lib.WINDOW_BYTES
        )
        store = await tensorstore.open(
            {
                "driver": "zarr",
                "kvstore": _folder(info.path),
                "dtype": tensorstore.dtype(leaf.dtype).name,
                # Without a fill value chunks of zeros are written, as Orbax wants it.
                "metadata": {
                    "shape": leaf.shape,
                    "chunks": chunk,
                    "compressor": None,
                },
            },
            create=True,
            # manifest.seal syncs all files at the end, which is faster.
            context=tensorstore.Context({"file_io_sync": False}),
        )
        pending = None
        for window in leaves_lib.windows(leaf.shape, chunk):
            values = leaf.read(window)
            leaves_lib.require_finite(values, info.name)
            if pending is not None:  # overlapped with the last read
                await pending
            pending = store[window].write(
                values, can_reference_source_data_indefinitely=True
            )
            self._bar.update(values.nbytes)
        if pending is not None:
            await pending


def _key(state: epath.Path, path: leaves_lib.Path, is_ocdbt: bool) -> Any:
    """Returns TensorStore's spec of a parameter's array in Orbax's layout."""
    name = ".".join((_TREE, *path))
    if is_ocdbt:
        return {"driver": "ocdbt", "base": _folder(state), "path": f"{name}/"}
    return _folder(state / name)


def _dotted(shapes: dict[leaves_lib.Path, Any]) -> dict[str, Any]:
    return {".".join((_TREE, *path)): shape for path, shape in shapes.items()}


def _folder(path: epath.Path) -> dict[str, str]:
    return {"driver": "file", "path": f"{path}/"}
