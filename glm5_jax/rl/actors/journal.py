"""Files from which the groups under way go on after a kill.

    RUN/episodes/under_way/INDEX.jsonl

A group's file gets a line when the group begins, for each turn that is sampled and for
each episode that ends with a reward. A run that starts again takes these episodes as
they are. It plays the others again: the environment hears the same answers as before,
which `Remembering` gives for the same prompts, and new ones are sampled from the turn
on that was under way. An environment that says something else than before makes another
prompt, so its episode goes on by itself from there.

Lines are written by a thread, in order, and not synced: they outlive the process, not
the machine's power. A line that was cut off and all after it are ignored. An engine
that records experts tells them for all the text at each turn. A line has those that the
episode's line before it had not, so a file grows with its text, not with its square.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import numpy as np
from absl import logging

from glm5_jax import files
from glm5_jax.inference import requests
from glm5_jax.rl import completer, long_json, trajectories
from glm5_jax.rl import episodes as episodes_lib

FOLDER, _SUFFIX = "under_way", ".jsonl"
FORMAT = 2  # of a file; others are ignored
_DAMAGE = (ValueError, KeyError, TypeError)
_Key = tuple[int | None, str]  # an episode's first request, and a prompt's SHA-256


@dataclasses.dataclass
class Known:
    """What the file of a group tells of it."""

    index: int
    version: int  # of the weights with which it began
    # Of the episodes that had ended, by their first request.
    ended: dict[int, episodes_lib.Episode] = dataclasses.field(default_factory=dict)
    turns: dict[_Key, list[requests.Completion]] = dataclasses.field(
        default_factory=dict
    )
    # The last turns of an episode, each of which repeats the experts of the one before
    # it and adds its own, by the episode's first request.
    _growing: dict[int | None, list[requests.Completion]] = dataclasses.field(
        default_factory=dict
    )

    def add(self, line: Mapping[str, Any], newest: int) -> bool:
        """Takes a line into account, unless newer weights drew some of it.

        Returns:
          Whether it did.
        """
        if turn := line.get("turn"):
            return self._add_turn(turn, newest)
        episode = trajectories.from_json(line["end"]["episode"])
        if any(v > newest for sample in episode.samples for v in sample.versions):
            return False
        id = line["end"]["id"]
        self.ended[id] = episode
        self.turns = {key: t for key, t in self.turns.items() if key[0] != id}
        self._growing.pop(id, None)
        return True

    def _add_turn(self, turn: Mapping[str, Any], newest: int) -> bool:
        """Takes a turn into account, unless it or the one before it is too new."""
        record, id = turn["completion"], turn["id"]
        grown = self._growing.pop(id, [])
        num_same = record.get("same_experts", 0)
        if num_same and not grown:
            return False
        before = grown[-1].experts if grown else None
        completion = trajectories.completion_from_json(record, before)
        if any(version > newest for version in completion.versions):
            return False
        if (experts := completion.experts) is not None:
            if before is None or num_same < len(before):
                grown = []
            for earlier in grown:  # one array for all of them
                assert earlier.experts is not None, "they grow"
                earlier.experts = experts[: len(earlier.experts)]
            self._growing[id] = [*grown, completion]
        self.turns.setdefault((id, turn["prompt"]), []).append(completion)
        return True


class Journal:
    """The files of a run's groups; calls are quick, but for `read`, and of one thread.

    All of them raise OSError if something could not be written before.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        """Makes the folder; None: nothing is kept.

        Raises:
          OSError: it cannot be made.
        """
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._thread = futures.ThreadPoolExecutor(1, "journal")
        self._pending: collections.deque[futures.Future[None]] = collections.deque()
        self._groups: dict[int, Known] = {}  # by index
        self._group_of: dict[int, Known] = {}  # by an episode's first request
        # Experts of an episode's last turn in this life, by its first request.
        self._experts: dict[int | None, np.ndarray] = {}
        self.num_repeated = 0  # turns
        self._is_closed = False

    def read(self, version: int) -> list[Known]:
        """Returns the groups of before a kill in order; call it before all else.

        Args:
          version: of the weights with which the run goes on. What newer ones drew is
            deleted, because the run will have other weights of their number.
        """
        if self._folder is None:
            return []
        stems = (path.stem for path in self._folder.glob(f"*{_SUFFIX}"))
        indices = sorted(int(stem) for stem in stems if stem.isdecimal())
        read = (_read(_path(self._folder, i), i, version) for i in indices)
        return [known for known in read if known is not None]

    def begin(self, known: Known, jobs: Sequence[episodes_lib.Job]) -> None:
        """Notes the episodes of a group that begins, or goes on from what is known."""
        self._groups[known.index] = known
        self._group_of |= {job.request_id: known for job in jobs}
        header = {"format": FORMAT, "version": known.version}

        def write(path: pathlib.Path) -> None:
            if not path.exists():
                _append(path, header)

        self._submit(known.index, write)

    def turn(self, request: requests.Request, completion: requests.Completion) -> None:
        """Notes a turn, if it is one of a group's."""
        if (known := self._of(request)) is None:
            return
        turn = {"id": request.session, "prompt": _digest(request.prompt)}
        before = self._experts.pop(request.session, None)
        if completion.experts is not None:
            self._experts[request.session] = completion.experts

        def write(path: pathlib.Path) -> None:
            made = trajectories.completion_to_json(completion, before)
            _append(path, {"turn": turn | {"completion": made}})

        self._submit(known.index, write)

    def end(self, job: episodes_lib.Job, episode: episodes_lib.Episode) -> None:
        """Notes that an episode has ended, which will not be played again."""
        known = self._group_of[job.request_id]
        self._experts.pop(job.request_id, None)

        def write(path: pathlib.Path) -> None:
            made = {"id": job.request_id, "episode": trajectories.to_json(episode)}
            _append(path, {"end": made})

        self._submit(known.index, write)

    def ended(self, job: episodes_lib.Job) -> episodes_lib.Episode | None:
        """Returns the episode of a job if it had ended before the kill."""
        return self._group_of[job.request_id].ended.get(job.request_id)

    def repeated(self, request: requests.Request) -> requests.Completion | None:
        """Returns an answer to the same prompt from before the kill, once."""
        if (known := self._of(request)) is None or not known.turns:
            return None
        turns = known.turns.get((request.session, _digest(request.prompt)))
        if not turns:
            return None
        self.num_repeated += 1
        return turns.pop(0)

    def forget(self, index: int) -> None:
        """Deletes the file of a group."""
        known = self._groups.pop(index, None)
        if known is not None:
            ids = [id for id, group in self._group_of.items() if group is known]
            for id in ids:
                del self._group_of[id]
                self._experts.pop(id, None)
        self._submit(index, lambda path: path.unlink(missing_ok=True))

    def close(self) -> None:
        """Waits until all is written; later calls write nothing."""
        self._is_closed = True
        self._thread.shutdown()

    def _of(self, request: requests.Request) -> Known | None:
        """Returns the group of a request; None: it is of none, as in an evaluation."""
        if request.session is None:
            return None
        return self._group_of.get(request.session)

    def _submit(self, index: int, write: Callable[[pathlib.Path], None]) -> None:
        """Lets the thread write into a group's file."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        if self._folder is not None and not self._is_closed:
            path = _path(self._folder, index)
            self._pending.append(self._thread.submit(write, path))


class Remembering:
    """A completer that notes every turn, and repeats those of before a kill."""

    def __init__(self, engine: completer.Completer, journal: Journal) -> None:
        """Asks `engine` for what `journal` does not know."""
        self._engine, self._journal = engine, journal

    @property
    def capacity(self) -> int:
        """Returns the most tokens of a prompt and its completion."""
        return self._engine.capacity

    async def complete(self, request: requests.Request) -> requests.Completion:
        """Returns the completion of a request: see `completer.Completer`."""
        if (known := self._journal.repeated(request)) is not None:
            return known
        completion = await self._engine.complete(request)
        self._journal.turn(request, completion)
        return completion


def _read(path: pathlib.Path, index: int, version: int) -> Known | None:
    """Returns what a file tells, without its damaged end and what is too new.

    Both are deleted from it. Returns None, and deletes the file, if nothing is left.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(True)
    known, kept = None, []
    try:
        for line in lines:
            if not line.endswith("\n"):
                raise ValueError("it is cut off")
            record = json.loads(line)
            if known is None:
                if record["format"] != FORMAT or record["version"] > version:
                    break
                known = Known(index, record["version"])
            elif not known.add(record, version):
                continue
            kept.append(line)
    except _DAMAGE as error:
        logging.warning("The end of %s is damaged and left out: %r", path, error)
    if known is None:
        path.unlink()
    elif len(kept) < len(lines):
        files.write_text(path, "".join(kept))
    return known


def _path(folder: pathlib.Path, index: int) -> pathlib.Path:
    return folder / f"{index}{_SUFFIX}"


def _append(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(long_json.pieces(record))
        file.write("\n")


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(prompt, "<u4").tobytes()).hexdigest()
