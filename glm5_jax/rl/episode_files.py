"""The episodes of a run in its folder, one file for each step that learnt from them.

    RUN/episodes/STEP.json.gz
    RUN/skipped/POSITION.json.gz

A file is written aside, synced and renamed, so a reader finds a whole one or none. A
step that is done again, after a kill or a rollback, replaces its file and deletes those
of later steps. So the files are the history of the parameters, and the episodes of the
groups that each step took are all that is needed to learn the same again, as a run of
stage async_rl does after a kill.

skipped/ has copies, by the position of their batch, that no later step replaces: of
steps whose gradient was not finite, and of those that a rollback undid.
"""

import dataclasses
import gzip
import json
import pathlib
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import long_json, trajectories

FOLDER, SKIPPED, _SUFFIX = "episodes", "skipped", ".json.gz"
FORMAT = 1  # of a file; a reader refuses others
_PLACES = 6  # decimal places of an advantage
_LEVEL = 1  # of zlib: 9 takes 12% less and five times as long
_DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zlib.error)

Floats = np.ndarray | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step learnt from."""

    step: int  # steps done with it: the first is 1
    position: int  # of its batch; the version of the weights that learnt from it
    groups: Sequence[Sequence[episodes_lib.Episode]]  # in order, with repeated ones
    unused: Sequence[episodes_lib.Episode]  # finished, and in no step's groups
    num_steps: int = 0  # of the run's schedule
    # What a checkpoint after it keeps of who plays; None: it is not known.
    memory: Mapping[str, Any] | None = None
    metrics: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    # Those of each token that a critic gave, by id() of the sample; else {}.
    advantages: Mapping[int, Floats] = dataclasses.field(default_factory=dict)


class Writer:
    """Writes files in a thread of its own, one at a time, within a bound."""

    def __init__(self, workdir: pathlib.Path, most_bytes: float) -> None:
        """Makes nothing yet.

        Args:
          workdir: folder of the run.
          most_bytes: of all files of a folder. The oldest ones are deleted first; the
            newest file always stays.
        """
        self._workdir, self._most_bytes = workdir, most_bytes
        self._thread = futures.ThreadPoolExecutor(1, "episodes")
        self._pending: futures.Future[None] | None = None

    def write(self, step: Step) -> None:
        """Starts to write a step; waits for the one before it.

        Raises:
          OSError: the file before this one could not be written.
        """
        self.wait()
        self._pending = self._thread.submit(self._write, step)

    def wait(self) -> None:
        """Waits until everything is on the disk.

        Raises:
          OSError: it could not be written.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Waits, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def set_apart(self, step: int, position: int) -> pathlib.Path:
        """Copies the file of a step to skipped/; waits until it is on the disk.

        Args:
          step: it has a file.
          position: of its batch.

        Raises:
          OSError: a file could not be written.
        """
        self.wait()
        return self._set_apart(step, position)

    def _set_apart(self, step: int, position: int) -> pathlib.Path:
        source = path_of(self._workdir, step)
        path = path_of(self._workdir, position, SKIPPED)
        files.write_atomically(path, lambda new: shutil.copyfile(source, new))
        self._bound(SKIPPED)
        return path

    def _write(self, step: Step) -> None:
        again = [n for n in numbers(self._workdir) if n >= step.step]
        for first in read_whole(self._workdir, again[:1]):
            # Equal after a kill, when batches come again; a rollback skips some.
            if first.position - first.step != step.position - step.step:
                for undone in read_whole(self._workdir, again):
                    self._set_apart(undone.step, undone.position)
        for n in again:
            if n > step.step:
                path_of(self._workdir, n).unlink()
        _write(self._workdir, step)
        self._bound(FOLDER)

    def _bound(self, folder: str) -> None:
        paths = [
            path_of(self._workdir, n, folder) for n in numbers(self._workdir, folder)
        ]
        sizes = [path.stat().st_size for path in paths]
        for i, path in enumerate(paths[:-1]):
            if sum(sizes[i:]) <= self._most_bytes:
                break
            path.unlink()


def path_of(workdir: pathlib.Path, number: int, folder: str = FOLDER) -> pathlib.Path:
    """Returns the file of a step; in SKIPPED, of a position."""
    return workdir / folder / f"{number}{_SUFFIX}"


def numbers(workdir: pathlib.Path, folder: str = FOLDER) -> list[int]:
    """Returns the steps that have a file, in order; in SKIPPED, the positions."""
    names = (p.name for p in (workdir / folder).glob(f"*{_SUFFIX}"))
    stems = (name.removesuffix(_SUFFIX) for name in names)
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read(workdir: pathlib.Path, number: int, folder: str = FOLDER) -> Step:
    """Returns what a step learnt from; see `path_of`.

    Raises:
      DamagedError: the file is not one that `Writer` wrote.
    """
    path = path_of(workdir, number, folder)
    try:
        return _from_json(json.loads(gzip.decompress(path.read_bytes())))
    except (*_DAMAGE, trajectories.FormatError) as error:
        raise config_lib.DamagedError(
            f"{path} cannot be read ({error!r}): it is damaged, or of another version "
            f"of glm5_jax. Delete it, or give steps without it."
        ) from error


def read_whole(
    workdir: pathlib.Path, which: Sequence[int], folder: str = FOLDER
) -> list[Step]:
    """Returns the steps that can be read, and logs an error for every other one."""
    found = []
    for number in which:
        try:
            found.append(read(workdir, number, folder))
        except config_lib.DamagedError as error:
            logging.error("%s", error)
    return found


def forget_memory(workdir: pathlib.Path, step: int) -> None:
    """Keeps a step for readers, but not to be learnt again after a kill."""
    for kept in read_whole(workdir, [step] if step in numbers(workdir) else []):
        if kept.memory is not None:
            _write(workdir, dataclasses.replace(kept, memory=None))


def _write(workdir: pathlib.Path, step: Step) -> None:
    text = long_json.dumps(_to_json(step))
    packed = gzip.compress(text.encode(), _LEVEL, mtime=0)
    path = path_of(workdir, step.step)
    files.write_atomically(path, lambda new: new.write_bytes(packed))


def _to_json(step: Step) -> dict[str, Any]:
    """Returns the content of a file, in which every episode stands once."""
    places: dict[int, int] = {}
    records: list[dict[str, Any]] = []
    for episode in [*(e for group in step.groups for e in group), *step.unused]:
        if id(episode) not in places:
            places[id(episode)] = len(records)
            records.append(trajectories.to_json(episode))
            found = [step.advantages.get(id(sample)) for sample in episode.samples]
            told = [_rounded(values) for values in found if values is not None]
            if told:
                records[-1]["advantages"] = told
    return {
        "format": FORMAT,
        "step": step.step,
        "position": step.position,
        "num_steps": step.num_steps,
        "memory": step.memory,
        "metrics": dict(step.metrics),
        "groups": [[places[id(e)] for e in group] for group in step.groups],
        "unused": [places[id(e)] for e in step.unused],
        "episodes": records,
    }


def _from_json(record: Mapping[str, Any]) -> Step:
    if record["format"] != FORMAT:
        raise ValueError(f"its format is {record['format']!r}, not {FORMAT}")
    episodes = [trajectories.from_json(e) for e in record["episodes"]]
    groups = [[episodes[i] for i in group] for group in record["groups"]]
    unused = [episodes[i] for i in record["unused"]]
    advantages = {
        id(sample): values
        for episode, kept in zip(episodes, record["episodes"], strict=True)
        if "advantages" in kept
        for sample, values in zip(episode.samples, kept["advantages"], strict=True)
    }
    return Step(
        record["step"],
        record["position"],
        groups,
        unused,
        # Earlier versions wrote none of these.
        num_steps=record.get("num_steps", 0),
        memory=record.get("memory"),
        advantages=advantages,
        metrics=record.get("metrics", {}),
    )


def _rounded(values: Floats) -> list[float]:
    """Returns numbers that are short in JSON."""
    return np.round(np.asarray(values, np.float64), _PLACES).tolist()
