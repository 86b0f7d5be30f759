"""Copies of a run's state that each host keeps by itself, between two checkpoints.

A checkpoint of a large model takes minutes and a file system that all hosts share. A
copy takes what a host's own memory or disk takes to write its shards, so it may be made
every few steps: a run that is started again loses those steps only. A host that has
lost its copy, or is new, gets its shards from a replica along the mesh's data axis. So
a run of several slices survives the loss of all but one of them, also with fewer
slices than before; where shards are lost, it resumes from its newest checkpoint.

Copies are made in FOLDER/NAME-LINEAGE/STEP/NUMBER.shards, by process. LINEAGE is a
random name in the run's own folder that a rollback deletes, so that nobody resumes from
what was rolled back.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.checkpoint import arrays, replicas, shard_file
from glm5_jax.processes import together

PyTree = Any
_LINEAGE = "lineage"  # file in the run's folder
_MOST = 4  # steps that a host tells the others of: it has one or two
_NONE = -1


class HostCopies:
    """Makes and restores the copies of one run; every process has one."""

    def __init__(self, workdir: pathlib.Path, folder: str) -> None:
        """Opens the folder, and removes copies that a rollback has made worthless.

        Args:
          workdir: the run's own folder, which all processes see.
          folder: of this host's copies; $NAME is a variable of the environment.

        Raises:
          InputError: the folder is not writable, or a variable in it is not set.
        """
        self._workdir = workdir
        self._root = pathlib.Path(os.path.expandvars(folder)).expanduser()
        if "$" in str(self._root):
            raise config_lib.InputError(
                f"host_copy_folder={folder!r} names a variable that is not set in the "
                f"environment of process {jax.process_index()}."
            )
        digest = hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()
        self._name = f"{workdir.name}-{digest[:12]}"
        self._uses = 0  # of the store of values, whose keys are used once
        self._lineage = self._agreed(lambda: read_lineage(workdir))
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._root).close()
        except OSError as error:
            raise config_lib.InputError(
                f"host_copy_folder={folder!r} is not writable: {error}. Name a folder "
                f"in memory or on a disk of each host."
            ) from error
        for path in self._root.iterdir():
            if path.name.startswith(f"{self._name}-") and path != self._folder:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(f"*/.{jax.process_index()}-*"):
            path.unlink(missing_ok=True)  # of a process that was killed
        self._thread = futures.ThreadPoolExecutor(1, "host_copy")
        self._pending: futures.Future[None] | None = None
        self._pending_step = _NONE

    @property
    def _folder(self) -> pathlib.Path:
        return self._root / f"{self._name}-{self._lineage or 'none'}"

    def save(self, step: int, state: PyTree, metadata: dict[str, Any]) -> None:
        """Copies this process's shards, and writes them in the background.

        The state may be donated as soon as this returns. A copy that cannot be written
        is told in the log; the run goes on. All processes must call it.
        """
        self.wait()
        if not self._lineage:
            self._lineage = self._agreed(lambda: _make_lineage(self._workdir))
        path = self._folder / str(step) / f"{jax.process_index()}.shards"
        parts, text = shard_file.own_parts(state), json.dumps(metadata)
        write = shard_file.write
        self._pending = self._thread.submit(write, path, step, text, parts)
        self._pending_step = step

    def restore(
        self, abstract_state: PyTree, newer_than: int
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Restores the newest copy that all shards are left of, or returns None.

        All processes must call it.

        Args:
          abstract_state: shapes, types and shardings of the result.
          newer_than: a step; older copies, and its own, are not tried.

        Returns:
          Step, state, metadata.
        """
        self.wait()
        held = self._held()
        mine = sorted(held, reverse=True)[:_MOST]
        padded = np.array([*mine, *[_NONE] * (_MOST - len(mine))], np.int32)
        steps = {*together.gathered(padded).ravel().tolist()}
        for step in sorted((n for n in steps if n > newer_than), reverse=True):
            found = self._restore(step, held.get(step, []), abstract_state)
            if found is not None:
                return step, *found
        return None

    def wait(self) -> None:
        """Waits until all have written the last copy; then older ones go.

        If one could not write it, it is of no use and goes instead.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, is_written = self._pending_step, True
        try:
            pending.result()
        except OSError as error:
            is_written = False
            logging.error("STEP %d HAS NO COPY ON THIS HOST: %s", step, error)
        is_of_all = together.all_true(is_written)
        for path in self._folder.glob(f"*/{jax.process_index()}.shards"):
            number = int(path.parent.name)
            if number < step if is_of_all else number == step:
                _remove(path)

    def drop(self) -> None:
        """Deletes this process's copies: a checkpoint or a rollback replaces them."""
        self.wait()
        for path in self._folder.glob(f"*/{jax.process_index()}.shards"):
            _remove(path)
        if together.is_first():
            forget(self._workdir)
        self._lineage = ""

    def close(self) -> None:
        """Waits for the copy that is being written; deletes nothing."""
        self._thread.shutdown()

    def _held(self) -> dict[int, list[shard_file.ShardFile]]:
        """Returns the sound files on this host, of all processes that wrote here."""
        held: dict[int, list[shard_file.ShardFile]] = {}
        for path in sorted(self._folder.glob("*/[0-9]*.shards")):
            with _logged(path):
                file = shard_file.ShardFile(path)
                held.setdefault(file.step, []).append(file)
        return held

    def _restore(
        self, step: int, held: Sequence[shard_file.ShardFile], abstract_state: PyTree
    ) -> tuple[PyTree, dict[str, Any]] | None:
        state = None
        with _logged(self._folder / str(step)):
            state = _read(held, abstract_state)
        has = together.gathered(np.array(state is not None)).tolist()
        mesh = jax.tree.leaves(abstract_state)[0].sharding.mesh
        chosen = replicas.sources(mesh, has)
        if chosen is None:
            logging.warning("Shards of the hosts' copies of step %d are lost.", step)
            return None
        text = held[0].metadata if state is not None else ""
        metadata = self._agreed(lambda: text, has.index(True))
        if not all(has):
            state = _zeros(abstract_state) if state is None else state
            state = replicas.spread(state, chosen)
        if not arrays.is_finite(state):
            logging.warning("The hosts' copies of step %d are not finite.", step)
            return None
        logging.info(
            "%d of %d processes had a copy of step %d on their hosts.",
            sum(has),
            len(has),
            step,
        )
        return state, json.loads(metadata)

    def _agreed(self, make: Callable[[], str], number: int = 0) -> str:
        """Returns a text that one process makes."""
        self._uses += 1
        return together.from_one(f"host_copies/{self._uses}", number, make)


def read_lineage(workdir: pathlib.Path) -> str:
    """Returns the random name of the copies that count for a run, or ""."""
    path = workdir / _LINEAGE
    return path.read_text() if path.exists() else ""


def forget(workdir: pathlib.Path) -> None:
    """Makes all copies of a run worthless."""
    (workdir / _LINEAGE).unlink(missing_ok=True)


def _make_lineage(workdir: pathlib.Path) -> str:
    name = secrets.token_hex(8)
    files.write_text(workdir / _LINEAGE, name)
    return name


def _read(
    held: Sequence[shard_file.ShardFile], abstract_state: PyTree
) -> PyTree | None:
    """Returns a state from this host's files; None if a shard is in none of them."""

    def array(name: str, leaf: Any) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            where = shard_file.bounds(index, leaf.shape)
            file = next(file for file in held if (name, where) in file)
            return file.read(name, where)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    leaves = shard_file.named(abstract_state)
    for name, leaf in leaves.items():
        places: Any = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        for index in places.values():
            part = name, shard_file.bounds(index, leaf.shape)
            if not any(part in file for file in held):
                return None
    read = [array(name, leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), read)


def _zeros(abstract_state: PyTree) -> PyTree:
    def zeros(leaf: Any) -> jax.Array:
        shard = np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: shard
        )

    return jax.tree.map(zeros, abstract_state)


def _remove(path: pathlib.Path) -> None:
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process's file is still in it
        path.parent.rmdir()


@contextlib.contextmanager
def _logged(path: pathlib.Path) -> Iterator[None]:
    """Tells of damage in the log; others may have the same shards."""
    try:
        yield
    except (OSError, ValueError, KeyError, config_lib.DamagedError) as error:
        logging.error("%s CANNOT BE READ: %s", path, error)
