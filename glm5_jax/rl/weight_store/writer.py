"""Adds versions of the weights to a store's folder."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import BinaryIO, NamedTuple

import jax
import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.rl.weight_store import coding, manifest

ALIGNMENT = 64  # bytes; jax uses aligned memory of a CPU as it is
_WINDOW_BYTES = 2**25
_THREADS = 4  # hashing and compressing release the GIL


class _Held(NamedTuple):
    """The last version of this process."""

    name: manifest.Name
    windows: dict[tuple[str, tuple[int, ...]], coding.Bytes]  # by leaf and start


class Writer:
    """A trainer's hand on a store; there is one at a time.

    Every process of a trainer writes the windows that it holds, into a file of its own.
    Process 0 completes the version.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        *,
        incarnation: int | None = None,
        full_every: int = 16,
        keep: int = 2,
        process: int = 0,
        gather: Callable[[str], Sequence[str]] = lambda text: [text],
    ) -> None:
        """Continues a store, or makes one.

        Args:
          root: the store's folder, made if missing.
          incarnation: of this start of the trainer, the same in every process; None
            takes the one after the last in the folder.
          full_every: versions until the next whole one, so that a reader that comes
            late needs at most as many.
          keep: versions that stay, beside the ones that these need.
          process: number of this process.
          gather: returns every process's value on process 0, and nothing elsewhere.
        """
        self._root = pathlib.Path(root)
        self._root.mkdir(parents=True, exist_ok=True)
        names = manifest.names(self._root)
        if incarnation is None:
            incarnation = names[-1].incarnation + 1 if names else 0
        self._incarnation, self._last = incarnation, -1
        self._full_every, self._keep = full_every, keep
        self._process, self._gather = process, gather
        self._held: _Held | None = None
        self._until_whole = 0  # versions before the next whole one
        if process == 0:  # of a trainer that was killed
            for stale in self._root.glob(".i*"):
                if not stale.name.startswith(f".i{incarnation:04d}-"):
                    shutil.rmtree(stale, ignore_errors=True)

    def restart(self) -> None:
        """Makes the next version whole, as when a reader reports a damaged one."""
        self._held = None

    def publish(self, params: dict, version: int) -> manifest.Manifest | None:
        """Adds a version; readers see all of it, or nothing.

        If it fails, the versions before stay as they are, and the next one is whole.

        Args:
          params: nested dict of arrays, in the dtypes that engines compute in.
          version: above the last one of this writer.

        Returns:
          The version's manifest, on process 0.

        Raises:
          InputError: the version does not increase.
          OSError: the folder cannot be written.
        """
        if version <= self._last:
            raise config_lib.InputError(
                f"version must increase, got {version} after {self._last}."
            )
        name = manifest.Name(self._incarnation, version)
        held, self._held = self._held, None  # until this version is complete
        if not self._until_whole:
            held, self._until_whole = None, self._full_every
        staging = self._root / f".{name.folder}"
        try:
            staging.mkdir(exist_ok=True)
            part, windows = self._write(staging, params, held)
            texts = self._gather(json.dumps(_fields(part)))
            found = self._commit(staging, name, held, texts) if texts else None
        except BaseException:
            if self._process == 0:
                shutil.rmtree(staging, ignore_errors=True)
            raise
        self._held, self._last = _Held(name, windows), version
        self._until_whole -= 1
        return found

    def _write(
        self, staging: pathlib.Path, params: dict, held: _Held | None
    ) -> tuple[dict[str, manifest.Leaf], dict]:
        """Writes this process's windows; returns their records, and their bytes."""
        before = {} if held is None else held.windows
        tree = {"/".join(path): x for path, x in leaves_lib.flatten(params)[0].items()}
        blocks = [
            (name, start, values)
            for name, array in tree.items()
            for start, values in _blocks(array)
        ]
        windows = {(n, start): _bytes(values) for n, start, values in blocks}
        records = {
            name: manifest.Leaf(tuple(x.shape), np.dtype(x.dtype).name, ())
            for name, x in tree.items()
        }
        file_name = f"process_{self._process}.bin"
        with (
            (staging / file_name).open("wb") as file,
            futures.ThreadPoolExecutor(_THREADS) as threads,
        ):
            coded = threads.map(
                lambda key: _coded(windows[key], before.get(key)), windows
            )
            for (name, start, values), (kind, stored, digest) in zip(
                blocks, coded, strict=True
            ):
                offset = _append(file, stored)
                window = manifest.Window(
                    start, values.shape, file_name, offset, len(stored), kind, digest
                )
                leaf = records[name]
                found = (*leaf.windows, window)
                records[name] = dataclasses.replace(leaf, windows=found)
            file.flush()
            os.fsync(file.fileno())
        return records, windows

    def _commit(
        self,
        staging: pathlib.Path,
        name: manifest.Name,
        held: _Held | None,
        texts: Sequence[str],
    ) -> manifest.Manifest:
        """Writes the manifest and gives the version its name."""
        parts = [manifest.leaves_from(json.loads(text)) for text in texts]
        leaves = manifest.merged(parts)
        is_whole = all(
            w.coding == coding.RAW for leaf in leaves.values() for w in leaf.windows
        )
        base = None if held is None or is_whole else held.name
        whole = manifest.Manifest(name, base, leaves)
        files.write_text(staging / manifest.FILE, manifest.to_text(whole))
        staging.rename(self._root / name.folder)
        files.sync_folder(self._root)
        self._prune()
        return whole

    def _prune(self) -> None:
        """Deletes the versions that are not needed to read the last ones."""
        names = manifest.names(self._root)
        needed = set(names[-self._keep :])
        try:
            for name in reversed(names):
                base = manifest.read(self._root, name).base if name in needed else None
                needed |= {base} - {None}
        except (OSError, manifest.StoreError) as error:
            logging.warning("Old versions of the weights stay: %s", error)
            return
        for name in set(names) - needed:
            folder = self._root / name.folder
            # Without its manifest a version is gone at once, for every reader.
            with contextlib.suppress(OSError):
                (folder / manifest.FILE).unlink()
            shutil.rmtree(folder, ignore_errors=True)


def _blocks(
    array: jax.Array | np.ndarray,
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields the blocks that this process stores of an array, with their starts."""
    if isinstance(array, np.ndarray):
        parts = [((0,) * array.ndim, array)]
    else:
        parts = [
            (tuple(cut.start or 0 for cut in shard.index), np.asarray(shard.data))
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
    for origin, data in parts:
        axes = range(data.ndim)
        size = leaves_lib.chunk_shape(
            data.shape, data.dtype.itemsize, axes, _WINDOW_BYTES
        )
        for window in leaves_lib.windows(data.shape, size):
            start = [o + cut.start for o, cut in zip(origin, window, strict=True)]
            yield tuple(start), data[(*window, ...)]  # an array also of no dims


def _bytes(values: np.ndarray) -> coding.Bytes:
    """Copies values, whose memory the trainer will write to again."""
    return np.array(values, order="C").reshape(-1).view(np.uint8)


def _coded(
    new: coding.Bytes, old: coding.Bytes | None
) -> tuple[str, coding.Stored, str]:
    """Returns a window's coding, its stored bytes, and the digest of its bytes."""
    return *coding.encode(new, old), hashlib.sha256(new.data).hexdigest()


def _append(file: BinaryIO, stored: coding.Stored) -> int:
    """Writes bytes at the next aligned offset, and returns it."""
    offset = math.ceil(file.tell() / ALIGNMENT) * ALIGNMENT
    file.write(bytes(offset - file.tell()))
    file.write(stored.data)
    return offset


def _fields(leaves: dict[str, manifest.Leaf]) -> dict:
    return {name: dataclasses.asdict(leaf) for name, leaf in leaves.items()}
