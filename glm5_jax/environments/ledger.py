"""Proofs in a file, from which an interrupted run resumes."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import glm5_jax
from glm5_jax import config
from glm5_jax.environments import proofs, protocol


def verdicts(path: pathlib.Path) -> Mapping[str, bool]:
    """Returns whether each task of a file is proven, by its id; its last line tells."""
    return {entry["task"]: not entry["failures"] for entry in _entries(path)}


class Ledger:
    """The proofs of a file, a JSON line each; a new one is appended as it is done."""

    def __init__(
        self,
        path: pathlib.Path | None,
        taskset: protocol.Taskset,
        num_repeats: int,
        through: str = "",
    ) -> None:
        """Reads what an earlier run has proven.

        Args:
            path: of the file, which need not exist; None keeps nothing.
            taskset: of the tasks. Proofs of tasks whose text, attempts or scoring were
                others, or by another version of this package, do not count.
            num_repeats: episodes of each solution.
            through: the service that plays them. Proofs with another one or another
                number do not count either.

        Raises:
            config.InputError: the file cannot be written.
        """
        self._path, self._taskset, self._how = path, taskset, (num_repeats, through)
        entries = _entries(path) if path else []
        if path:
            _begin(path, entries)
        self._known = {entry.pop("key", ""): entry for entry in entries}

    def find(self, task: protocol.Task) -> proofs.Proof | None:
        """Returns the proof of a task, failed ones too; None: it is to be played."""
        entry = self._known.get(self._key(task))
        if entry is None:
            return None
        fields: dict[str, Any] = {**entry, "failures": tuple(entry["failures"])}
        return proofs.Proof(**fields)

    def add(self, task: protocol.Task, proof: proofs.Proof) -> None:
        """Appends a proof."""
        if self._path is None:
            return
        entry = {**dataclasses.asdict(proof), "key": self._key(task)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _key(self, task: protocol.Task) -> str:
        attempts = proofs.attempts_of(self._taskset, task)
        about = {
            "told": [task.id, task.messages],
            "how": [*self._how, glm5_jax.__version__],
            "attempts": attempts and dataclasses.asdict(attempts),
            "scored_by": proofs.scored_by(self._taskset, task),
        }
        told = json.dumps(about, sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def _begin(path: pathlib.Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Writes a file anew, without a line that was cut off, so that it can be appended.

    Raises:
        config.InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            path.open("ab").close()
            return
        partial = path.with_name(f".{path.name}.partial")
        text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        partial.write_text(text, encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        raise config.InputError(
            f"--out={str(path)!r} cannot be written ({error}); name another file."
        ) from error


def _entries(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a file, which need not exist; half a line is none."""
    *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    found = [json.loads(line) for line in lines if line.rstrip().endswith(b"}")]
    with contextlib.suppress(ValueError):  # it was cut off, if there is any
        found.append(json.loads(last))
    return found
