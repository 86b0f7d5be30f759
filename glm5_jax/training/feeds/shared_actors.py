"""The actors of process 0, for all processes of a trainer.

    process 0: orchestrator ──▶ groups ──▶ file ──▶ processes 1, 2, ...

Every process needs the episodes of a step, of which it makes its rows. Process 0 writes
what its orchestrator answers into the folder of the weights, which all hosts of a run
share, and tells the file's SHA-256 over the service that joins the processes. All
processes write the weights, each what its devices hold.
"""

import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5_jax import files
from glm5_jax.processes import together
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import held_out, trajectories
from glm5_jax.training.feeds import actors as actors_lib

_FILE = "shared_episodes_{}.json"  # in the folder; one at a time


class SharedActors:
    """Actors that process 0 asks, as `actors.Actors`; every process makes each call."""

    def __init__(self, actors: actors_lib.Actors, folder: pathlib.Path) -> None:
        """Shares what the actors of process 0 say.

        Args:
          actors: of this process; those of process 0 alone are asked, but for
            `publish`.
          folder: that all processes see.
        """
        self._actors, self._folder = actors, folder
        self._numbers = itertools.count()  # of what was shared

    def publish(self, params: dict, version: int) -> None:
        """Gives the engines weights, of which each process writes its part."""
        self._actors.publish(params, version)

    def start(self, state: Mapping[str, Any], folder: pathlib.Path | None) -> None:
        """Begins to play."""
        if together.is_first():
            self._actors.start(state, folder)

    def take(self, version: int) -> actors_lib.Taken:
        """Returns the groups of the next step, the same ones in every process.

        Raises:
          OSError: the folder cannot be written, or is not the same for all.
        """
        return _taken(self._shared(lambda: _record(self._actors.take(version))))

    def evaluate(self) -> Sequence[episodes_lib.Episode]:
        """Returns the episodes of the held-out tasks, the same ones in every process.

        Raises:
          OSError: the folder cannot be written, or is not the same for all.
        """
        made = self._shared(lambda: trajectories.all_to_json(self._actors.evaluate()))
        return trajectories.all_from_json(made)

    def evaluate_beside(self, version: int) -> None:
        """Begins to play the held-out tasks, for a later `take`."""
        if together.is_first():
            self._actors.evaluate_beside(version)

    def memory(self, version: int) -> Mapping[str, Any]:
        """Returns what a checkpoint of a version must keep."""
        return self._shared(lambda: self._actors.memory(version))

    def close(self) -> None:
        """Ends the actors of this process, and deletes what was shared last."""
        self._actors.close()
        if together.is_first():
            self._forget()

    def _shared(self, make: Callable[[], Any]) -> Any:
        """Returns what process 0 makes, which fits JSON."""
        number = next(self._numbers)
        path = self._folder / _FILE.format(number)

        def written() -> str:
            self._forget()
            data = json.dumps(make(), default=repr).encode()
            files.write_atomically(path, lambda new: new.write_bytes(data))
            return hashlib.sha256(data).hexdigest()

        digest = together.from_first(f"shared_episodes/{number}", written)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise OSError(
                f"{path} is not what process 0 wrote: rl.weights_store must be one "
                f"folder that all hosts of the run share."
            )
        # Process 0 deletes the file when it makes the next one: all must have read it.
        together.meet(f"shared_episodes/{number}")
        return json.loads(data)

    def _forget(self) -> None:
        """Deletes what was shared last, also by a trainer that was killed."""
        for path in self._folder.glob(_FILE.format("*")):
            path.unlink(missing_ok=True)


def _record(taken: actors_lib.Taken) -> dict[str, Any]:
    played = trajectories.pack([*taken.groups, taken.episodes, taken.unused])
    record: dict[str, Any] = {
        "played": played,
        "metrics": dict(taken.metrics),
        "memory": taken.memory,
    }
    if taken.evaluated is not None:
        version, episodes = taken.evaluated
        record["evaluated"] = version, trajectories.all_to_json(episodes)
    return record


def _taken(record: Mapping[str, Any]) -> actors_lib.Taken:
    *groups, episodes, unused = trajectories.unpack(record["played"])
    evaluated = None
    if "evaluated" in record:
        version, records = record["evaluated"]
        evaluated = held_out.Evaluation(version, trajectories.all_from_json(records))
    metrics, memory = record["metrics"], record["memory"]
    return actors_lib.Taken(groups, episodes, unused, metrics, memory, evaluated)
