"""Copies of a run's state that each host keeps by itself, between two checkpoints.

A checkpoint of a large model takes minutes and a file system that all hosts share. A
copy takes what a host's own memory or disk takes to write its shards, so it may be made
every few steps: a run that is started again loses those steps only. A host that has
lost its copy, or is new, gets its shards from a replica along the mesh's data axis. So
a run of several slices survives the loss of all but one of them, also with fewer
slices than before; where a shard is lost, it resumes from its newest checkpoint.

A copy is FOLDER/glm5_jax-NAME-LINEAGE/STEP-START/NUMBER.shards, by process. LINEAGE is
a random name in the run's own folder that a rollback deletes, so that nobody resumes
from what was rolled back. START is a random number of each start of the run: two starts
may reach a step with other bits, which must not be mixed.
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
from jax.sharding import Mesh

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.checkpoint import arrays, replicas, shard_file
from glm5_jax.config import checks
from glm5_jax.processes import together

PyTree = Any
_LINEAGE = "lineage"  # file in the run's folder
_MOST = 4  # copies that a process tells the others of; more are older
_NONE = -1
_UNREADABLE = (OSError, ValueError, KeyError, config_lib.DamagedError)
Copy = tuple[int, int]  # step, start


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
        checks.require_local(folder, "host_copy_folder")
        self._workdir = workdir
        self._root = pathlib.Path(os.path.expandvars(folder)).expanduser()
        if "$" in str(self._root):
            raise config_lib.InputError(
                f"host_copy_folder={folder!r} names a variable that is not set in the "
                f"environment of process {jax.process_index()}."
            )
        digest = hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()
        self._prefix = f"glm5_jax-{workdir.name}-{digest[:12]}-"
        self._num_agreed = 0  # the names of what processes tell each other differ
        self._lineage = self._agreed(lambda: read_lineage(workdir))
        self._start = int(self._agreed(lambda: str(secrets.randbits(31))))
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._root).close()
        except OSError as error:
            raise config_lib.InputError(
                f"host_copy_folder={folder!r} is not writable: {error}. Name a folder "
                f"in memory or on a disk of each host."
            ) from error
        for path in self._root.iterdir():
            if path.name.startswith(self._prefix) and path != self._folder:
                shutil.rmtree(path, ignore_errors=True)
        self._thread = futures.ThreadPoolExecutor(1, "host_copy")
        self._pending: futures.Future[None] | None = None
        self._pending_step = _NONE

    @property
    def _folder(self) -> pathlib.Path:
        return self._root / f"{self._prefix}{self._lineage or 'none'}"

    def save(self, step: int, state: PyTree, metadata: dict[str, Any]) -> None:
        """Copies this process's shards, and writes them in the background.

        The state may be donated as soon as this returns. A copy that cannot be written
        is told in the log; the run goes on. All processes must call it.
        """
        self.wait()
        if not self._lineage:
            self._lineage = self._agreed(lambda: _make_lineage(self._workdir))
        path = self._path(step, self._start) / f"{jax.process_index()}.shards"
        parts, text = shard_file.own_parts(state), json.dumps(metadata)
        self._pending = self._thread.submit(_write, path, step, text, parts)
        self._pending_step = step

    def restore(
        self, abstract_state: PyTree, newer_than: int
    ) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Restores the newest copy that all shards are left of, or returns None.

        Other copies on this host are deleted. All processes must call it.

        Args:
          abstract_state: shapes, types and shardings of the result.
          newer_than: a step; older copies, and its own, are not tried.

        Returns:
          Step, state, metadata.
        """
        self.wait()
        held = self._held()
        mine = sorted(held, reverse=True)[:_MOST]
        padded = np.full((_MOST, 2), _NONE, np.int32)
        padded[: len(mine)] = np.array(mine, np.int32).reshape(-1, 2)
        told = together.gathered(padded).reshape(-1, 2).tolist()
        copies = {(step, start) for step, start in told if step > newer_than}
        for copy in sorted(copies, reverse=True):
            found = self._restore(copy, held.get(copy, []), abstract_state)
            if found is not None:
                self._remove_others(copy)
                return copy[0], *found
        self._remove_others(None)
        return None

    def wait(self) -> None:
        """Waits until all have written the last copy; then the others go.

        If one process could not write it, its other shards go instead.
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
        for copy, path in self._paths():
            if is_of_all and (copy[1] != self._start or copy[0] < step):
                shutil.rmtree(path, ignore_errors=True)
            elif not is_of_all and copy == (step, self._start):
                (path / f"{jax.process_index()}.shards").unlink(missing_ok=True)

    def drop(self) -> None:
        """Deletes the copies: what replaces them is safe, or they are worth nothing."""
        self.wait()
        self._remove_others(None)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        if together.is_first():
            forget(self._workdir)
        self._lineage = ""

    def close(self) -> None:
        """Waits for the copy that is being written; deletes nothing."""
        self._thread.shutdown()

    def _path(self, step: int, start: int) -> pathlib.Path:
        return self._folder / f"{step}-{start}"

    def _paths(self) -> list[tuple[Copy, pathlib.Path]]:
        """Returns the copies in this host's folder, of all processes."""
        found = []
        for path in self._folder.glob("[0-9]*-[0-9]*"):
            step, _, start = path.name.partition("-")
            found.append(((int(step), int(start)), path))
        return found

    def _remove_others(self, kept: Copy | None) -> None:
        """Removes copies from this host once all processes have read theirs."""
        together.all_true(True)
        for copy, path in self._paths():
            if copy != kept:
                shutil.rmtree(path, ignore_errors=True)
        together.all_true(True)  # only then may one write again

    def _held(self) -> dict[Copy, list[shard_file.ShardFile]]:
        """Returns the files on this host with sound headers, of all processes."""
        held: dict[Copy, list[shard_file.ShardFile]] = {}
        for copy, folder in self._paths():
            for path in sorted(folder.glob("[0-9]*.shards")):
                with _logged(path):
                    file = shard_file.ShardFile(path)
                    if file.step != copy[0]:
                        raise config_lib.DamagedError(f"it holds step {file.step}.")
                    held.setdefault(copy, []).append(file)
        return held

    def _restore(
        self, copy: Copy, files: Sequence[shard_file.ShardFile], abstract_state: PyTree
    ) -> tuple[PyTree, dict[str, Any]] | None:
        step, mesh = copy[0], jax.tree.leaves(abstract_state)[0].sharding.mesh
        state, is_whole = None, _is_whole(files, abstract_state)
        if self._sources(step, mesh, is_whole)[1] is None:
            return None  # before a byte is read
        if is_whole:
            with _logged(self._path(*copy)):
                state = _read(files, abstract_state)
        has, chosen = self._sources(step, mesh, state is not None)
        if chosen is None:
            return None
        text = files[0].metadata if state is not None else ""
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

    def _sources(
        self, step: int, mesh: Mesh, mine: bool
    ) -> tuple[list[bool], np.ndarray | None]:
        """Returns who has its shards, and the devices that others take theirs from."""
        has = together.gathered(np.array(mine)).tolist()
        chosen = replicas.sources(mesh, has)
        if chosen is None:
            logging.warning("Shards of the hosts' copies of step %d are lost.", step)
        return has, chosen

    def _agreed(self, make: Callable[[], str], number: int = 0) -> str:
        """Returns a text that one process makes."""
        self._num_agreed += 1
        return together.from_one(f"host_copies/{self._num_agreed}", number, make)


def _write(
    path: pathlib.Path, step: int, metadata: str, parts: shard_file.Parts
) -> None:
    path.parents[1].mkdir(mode=0o700, exist_ok=True)  # nobody else reads it
    shard_file.write(path, step, metadata, parts)


def read_lineage(workdir: pathlib.Path) -> str:
    """Returns the random name of the copies that count for a run, or ""."""
    path = workdir / _LINEAGE
    return path.read_text(errors="replace").strip() if path.exists() else ""


def forget(workdir: pathlib.Path) -> None:
    """Makes all copies of a run worthless."""
    (workdir / _LINEAGE).unlink(missing_ok=True)


def _make_lineage(workdir: pathlib.Path) -> str:
    name = secrets.token_hex(8)
    files.write_text(workdir / _LINEAGE, name)
    return name


def _is_whole(files: Sequence[shard_file.ShardFile], abstract_state: PyTree) -> bool:
    """Returns whether the files hold every shard of this process."""
    for name, leaf in shard_file.named(abstract_state).items():
        places: Any = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        for index in places.values():
            part = name, shard_file.bounds(index, leaf.shape)
            if not any(part in file for file in files):
                return False
    return True


def _read(files: Sequence[shard_file.ShardFile], abstract_state: PyTree) -> PyTree:
    """Returns a state from this host's files, which hold every shard.

    Raises:
      DamagedError: every file with some shard is damaged in it.
    """

    def array(name: str, leaf: Any) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            where, failure = shard_file.bounds(index, leaf.shape), None
            for file in files:
                try:
                    if (name, where) in file:
                        return file.read(name, where)
                except config_lib.DamagedError as error:
                    logging.error("%s", error)
                    failure = error
            raise failure or KeyError(name)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    read = [array(*named) for named in shard_file.named(abstract_state).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), read)


def _zeros(abstract_state: PyTree) -> PyTree:
    def zeros(leaf: Any) -> jax.Array:
        shard = np.zeros(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: shard
        )

    return jax.tree.map(zeros, abstract_state)


@contextlib.contextmanager
def _logged(path: pathlib.Path) -> Iterator[None]:
    """Tells of damage in the log; others may have the same shards."""
    try:
        yield
    except _UNREADABLE as error:
        logging.error("%s CANNOT BE READ: %s", path, error)
