"""Groups of episodes that a step of reinforcement learning gets, and who plays them."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from glm5_jax.rl import episodes as episodes_lib

Group = list[episodes_lib.Episode]  # of one task


@dataclasses.dataclass(frozen=True)
class Played:
    """The groups of a step."""

    groups: Sequence[Group]  # at most rl.prompts_per_step, all usable
    episodes: Sequence[episodes_lib.Episode]  # all that were played, for the metrics
    unused: Sequence[episodes_lib.Episode]  # that no step learns from
    metrics: Mapping[str, float | int]
    # What a checkpoint after the step keeps of `Source.memory`; None: ask for it.
    memory: Mapping[str, Any] | None = None
    is_kept: bool = False  # by the run's folder, from which the groups come


@runtime_checkable
class Source(Protocol):
    """Plays groups with the weights of the policy."""

    @property
    def shown(self) -> Sequence[episodes_lib.Episode]:
        """Returns a few of the episodes that were played last."""
        ...

    def begin(self, workdir: pathlib.Path, step: int) -> None:
        """Uses the folder of a run, of which `step` steps are done, from now on."""
        ...

    def play(self, params: dict, position: int) -> Played:
        """Returns the groups of the step at a position (feeds/feed.py)."""
        ...

    def evaluate(self, params: dict, position: int) -> dict[str, float]:
        """Returns success on held-out tasks: see `player.Player.evaluate`."""
        ...

    def evaluate_beside(self, params: dict, position: int) -> bool:
        """Begins an evaluation for the metrics of a later `play`; False: it cannot."""
        ...

    def memory(self, position: int) -> Mapping[str, Any]:
        """Returns what a checkpoint of a position must keep; it fits JSON."""
        ...

    def resume(self, memory: Mapping[str, Any]) -> None:
        """Continues from what `memory` returned."""
        ...

    def disown(self) -> None:
        """Lets no episode go on in a later process: these engines drew wrong tokens."""
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...
