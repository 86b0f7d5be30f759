"""Who plays the episodes of an asynchronous run, and with which engines."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import held_out
from glm5_jax.training.feeds import groups as groups_lib


@dataclasses.dataclass(frozen=True)
class Taken:
    """The groups of a step."""

    groups: Sequence[groups_lib.Group]
    episodes: Sequence[episodes_lib.Episode]  # that ended since the last step
    unused: Sequence[episodes_lib.Episode]  # that no step learns from
    metrics: Mapping[str, float | int]
    memory: Mapping[str, Any]  # `Actors.memory` of a checkpoint after the step
    evaluated: held_out.Evaluation | None = None  # that is over since the last step


@runtime_checkable
class Actors(Protocol):
    """Plays in the background, from `start` to `close`."""

    def publish(self, params: dict, version: int) -> None:
        """Gives the engines weights, with which they continue.

        Versions never fall; weights of the last version are the same ones.
        """
        ...

    def start(self, state: Mapping[str, Any], folder: pathlib.Path | None) -> None:
        """Begins to play; `publish` comes before.

        Args:
          state: what `memory` returned.
          folder: of the files of what is under way, which goes on; None: none are kept.
        """
        ...

    def take(self, version: int) -> Taken:
        """Lets groups begin with a version; waits for those of the step after it."""
        ...

    def evaluate(self) -> Sequence[episodes_lib.Episode]:
        """Plays the held-out tasks with the weights that were published last."""
        ...

    def evaluate_beside(self, version: int) -> None:
        """Plays them while the trainer goes on; a later `take` returns them.

        Does nothing while such an evaluation is under way. One is lost with the engines
        that play it.

        Args:
          version: that was published last.
        """
        ...

    def memory(self, version: int) -> Mapping[str, Any]:
        """Returns what a checkpoint of a version must keep; it fits JSON."""
        ...

    def close(self) -> None:
        """Cancels all episodes and ends the engines."""
        ...
