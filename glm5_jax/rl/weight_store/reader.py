"""Takes versions of the weights from a store, and proves them first."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np
from absl import logging

from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.rl.weight_store import coding, manifest, sources
from glm5_jax.rl.weight_store.manifest import StoreError

_THREADS = 4  # hashlib releases the GIL
_ATTEMPTS = 3  # at versions that are deleted while they are read

Start = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Held:
    """An array, by the windows that a reader holds of it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    windows: dict[Start, np.ndarray]  # by their starts


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A proven version in memory, or in mapped files, which must not be changed."""

    name: manifest.Name
    leaves: dict[str, Held]

    @property
    def version(self) -> int:
        """Returns the version that tokens of these weights record."""
        return self.name.version


class Reader:
    """An engine's eye on a store."""

    def __init__(
        self,
        root: str | os.PathLike | sources.Source,
        needs: Callable[[str, manifest.Window], bool] = lambda leaf, window: True,
    ) -> None:
        """Reads from a folder, which may not exist yet, or from another source.

        Args:
          root: the store's folder, or where it is read.
          needs: whether a window of a leaf is wanted; one process of several may
            leave out what its devices do not hold.
        """
        is_path = isinstance(root, str | os.PathLike)
        self._source = sources.Folder(root) if is_path else root
        self._needs = needs

    def latest(self) -> manifest.Name | None:
        """Returns the name of the last complete version; None if there is none."""
        names = self._source.names()
        return names[-1] if names else None

    def follow(self, held: Snapshot | None = None) -> Snapshot | None:
        """Returns the last complete version, or None if `held` is it.

        If it is damaged, the trainer's `Writer.restart` lets a whole version follow.

        Args:
          held: what this method returned last; its memory is shared where it can be.

        Raises:
          StoreError: a version is damaged or needs one that is gone; `held` is as good
            as before.
        """
        for attempt in range(_ATTEMPTS):
            name = self.latest()
            if name is None or (held is not None and name == held.name):
                return None
            try:
                return self.read(name, held)
            except FileNotFoundError as error:
                is_last = attempt + 1 == _ATTEMPTS
                if is_last or name == self.latest():  # no newer one has replaced it
                    raise StoreError(f"{name.folder} lacks a file: {error}.") from error
        raise AssertionError("the last attempt returns or raises")

    def read(self, name: manifest.Name, held: Snapshot | None = None) -> Snapshot:
        """Reads one version and every version that it needs, and checks all bytes.

        Args:
          name: of the version.
          held: a version in memory, which saves reading the ones before it. If the
            difference to it does not fit, all are read from the last whole one.

        Raises:
          FileNotFoundError: the version, or one that it needs, is not there.
          StoreError: one is damaged.
        """
        try:
            return self._read(name, held)
        except StoreError as error:
            if held is None:
                raise
            logging.warning("%s Reading it from the last whole version.", error)
            return self._read(name, None)

    def _read(self, name: manifest.Name, held: Snapshot | None) -> Snapshot:
        chain = [self._source.read(name)]
        while (base := chain[-1].base) is not None:
            if held is not None and held.name == base:
                break
            chain.append(self._source.read(base))
        found = held if chain[-1].base is not None else None
        for record in reversed(chain):
            found = self._applied(record, found)
        assert found is not None, "a chain has at least one version"
        return found

    def _applied(self, record: manifest.Manifest, base: Snapshot | None) -> Snapshot:
        """Returns a version from the bytes of its folder and the version before."""
        files = {w.file for leaf in record.leaves.values() for w in leaf.windows}
        blobs = {file: self._source.open(record.name, file) for file in files}

        def one(leaf: str, window: manifest.Window) -> np.ndarray:
            dtype = np.dtype(record.leaves[leaf].dtype)
            old = None if base is None else base.leaves[leaf].windows[window.start]
            try:
                return _proven(window, dtype, blobs[window.file], old)
            except (ValueError, KeyError) as error:
                raise StoreError(
                    f"{record.name.folder}: {leaf} from {window.start} on is damaged: "
                    f"{error}."
                ) from error

        wanted = [
            (leaf, window)
            for leaf, found in record.leaves.items()
            for window in found.windows
            if self._needs(leaf, window)
        ]
        held = {
            name: Held(leaf.shape, np.dtype(leaf.dtype), {})
            for name, leaf in record.leaves.items()
        }
        with futures.ThreadPoolExecutor(_THREADS) as threads:
            values = threads.map(one, *zip(*wanted, strict=True)) if wanted else ()
            for (leaf, window), value in zip(wanted, values, strict=True):
                held[leaf].windows[window.start] = value
        return Snapshot(record.name, held)


def place(snapshot: Snapshot, abstract_params: dict) -> dict:
    """Returns a version as arrays on devices, each with the parts of its sharding.

    On a CPU the arrays may be the mapped files themselves.

    Args:
      snapshot: from a `Reader`.
      abstract_params: tree of jax.ShapeDtypeStruct with shardings.

    Raises:
      StoreError: names, shapes or dtypes differ.
    """
    wanted, _ = leaves_lib.flatten(abstract_params)
    _require_same({"/".join(path): leaf for path, leaf in wanted.items()}, snapshot)
    arrays = {
        path: jax.make_array_from_callback(
            leaf.shape,
            leaf.sharding,
            functools.partial(_cut, snapshot.leaves["/".join(path)]),
        )
        for path, leaf in wanted.items()
    }
    return leaves_lib.unflatten(arrays)


def _require_same(wanted: dict[str, Any], snapshot: Snapshot) -> None:
    """Raises StoreError if the weights are those of another model."""
    for name in sorted({*wanted} ^ {*snapshot.leaves}):
        where = "the model lacks" if name in snapshot.leaves else "the store lacks"
        raise StoreError(
            f"Version {snapshot.version} is of another model: {where} {name}."
        )
    for name, leaf in wanted.items():
        held = snapshot.leaves[name]
        ours, theirs = (leaf.shape, np.dtype(leaf.dtype)), (held.shape, held.dtype)
        if ours != theirs:
            raise StoreError(
                f"Version {snapshot.version} is of another model: {name} has {theirs}, "
                f"and the model has {ours}."
            )


def _cut(held: Held, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a block of an array, without a copy if one window holds it."""
    bounds = [cut.indices(n)[:2] for cut, n in zip(index, held.shape, strict=True)]
    whole: np.ndarray | None = None
    num_found = 0
    for start, values in held.windows.items():
        inside, outside = [], []
        for (low, high), first, size in zip(bounds, start, values.shape, strict=True):
            begin, end = np.clip((first, first + size), low, high)
            inside.append(slice(begin - first, end - first))
            outside.append(slice(begin - low, end - low))
        part = values[(*inside, ...)]
        if not part.size:  # the window is elsewhere
            continue
        shape = tuple(high - low for low, high in bounds)
        if part.shape == shape:
            return part
        if whole is None:
            whole = np.empty(shape, held.dtype)
        whole[(*outside, ...)] = part
        num_found += part.size
    if whole is None or num_found != whole.size:
        raise StoreError(f"The windows do not cover {bounds}, which a device needs.")
    return whole


def _proven(
    window: manifest.Window, dtype: np.dtype, blob: sources.Blob, old: np.ndarray | None
) -> np.ndarray:
    """Returns the writer's values of a window.

    Raises:
      ValueError: the bytes are others.
    """
    stored = blob.read(window.offset, window.num_bytes)
    if len(stored) != window.num_bytes:
        raise ValueError(f"{window.file} ends before its bytes")
    size = int(np.prod(window.shape, dtype=np.int64)) * dtype.itemsize
    before = None if old is None else old.reshape(-1).view(np.uint8)
    values = coding.decode(window.coding, stored, before, size)
    if hashlib.sha256(values.data).hexdigest() != window.digest:
        raise ValueError("its bytes do not have their digest")
    return values.view(dtype).reshape(window.shape)
