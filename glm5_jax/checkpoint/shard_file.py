"""A file with the parts of a training state that one process holds.

The length of the header, its SHA-256, the header as JSON, then the parts, one after the
other. The header has the step, the metadata as text, and each part's leaf, bounds,
place and SHA-256. A part is read, and verified, without the others.
"""

import hashlib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes  # noqa: F401  numpy knows the names of its number types
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import files

PyTree = Any
Bounds = tuple[tuple[int, int], ...]  # start and stop in each dim of a leaf
Parts = Mapping[str, Mapping[Bounds, np.ndarray]]  # by the leaf's name
_LENGTH_BYTES, _DIGEST_BYTES = 8, hashlib.sha256().digest_size


def named(state: PyTree) -> dict[str, Any]:
    """Returns the leaves of a state by their paths, such as "['params']['w']"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """Returns the bounds of a shard from its index, as jax gives it."""
    pairs = zip(index, shape, strict=True)
    return tuple(window.indices(size)[:2] for window, size in pairs)


def own_parts(state: PyTree) -> dict[str, dict[Bounds, np.ndarray]]:
    """Copies the shards on this process's devices to the host, each one once."""
    shards = {name: _unique_shards(leaf) for name, leaf in named(state).items()}
    for windows in shards.values():
        for shard in windows.values():
            shard.copy_to_host_async()
    return jax.tree.map(_on_host, shards)


def _unique_shards(leaf: jax.Array) -> dict[Bounds, jax.Array]:
    found = {}
    for shard in leaf.addressable_shards:
        found.setdefault(bounds(shard.index, leaf.shape), shard.data)
    return found


def _on_host(shard: jax.Array) -> np.ndarray:
    """Returns a copy that stays when the shard is donated."""
    is_here = any(device.platform == "cpu" for device in shard.devices())
    return np.array(shard) if is_here else np.asarray(shard)


def write(path: pathlib.Path, step: int, metadata: str, parts: Parts) -> None:
    """Writes a file under a temporary name, and renames it.

    Raises:
      OSError: the disk is full, or the folder is not writable.
    """
    header: dict[str, Any] = {"step": step, "metadata": metadata, "leaves": {}}
    offset, arrays = 0, []
    for name, windows in parts.items():
        header["leaves"][name] = held = []
        for where, array in windows.items():
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            digest = hashlib.sha256(content.data).hexdigest()
            held.append([where, array.dtype.name, offset, digest])
            offset += content.nbytes
            arrays.append(content)
    text = json.dumps(header).encode()

    def fill(temporary: pathlib.Path) -> None:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
            file.write(hashlib.sha256(text).digest())
            file.write(text)
            for content in arrays:
                file.write(content.data)

    files.write_atomically(path, fill)


class ShardFile:
    """One such file, whose header has been read and verified."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the header.

        Raises:
          DamagedError: it is not what was written.
        """
        self._path = path
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES + _DIGEST_BYTES)
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            is_possible = length <= path.stat().st_size
            text = file.read(length) if is_possible else b""
            self._data = file.tell()
        if hashlib.sha256(text).digest() != start[_LENGTH_BYTES:]:
            raise config_lib.DamagedError(f"{path} has a damaged header.")
        header = json.loads(text)
        self.step: int = header["step"]
        self.metadata: str = header["metadata"]
        self._parts = {
            (name, tuple(map(tuple, where))): rest
            for name, held in header["leaves"].items()
            for where, *rest in held
        }

    def __contains__(self, part: tuple[str, Bounds]) -> bool:
        """Returns whether it holds a leaf's part."""
        return part in self._parts

    def read(self, name: str, where: Bounds) -> np.ndarray:
        """Returns a part of a leaf.

        Raises:
          DamagedError: it is not what was written.
        """
        type_name, offset, digest = self._parts[name, where]
        shape = [stop - start for start, stop in where]
        dtype = np.dtype(type_name)
        with self._path.open("rb") as file:
            file.seek(self._data + offset)
            content = file.read(math.prod(shape) * dtype.itemsize)
        if hashlib.sha256(content).hexdigest() != digest:
            raise config_lib.DamagedError(f"{self._path} is damaged in {name}.")
        return np.frombuffer(content, dtype).reshape(shape)
