"""Words to reverse whose environment sometimes crashes or pays nonsense, for chaos.py.

What happens to an episode is drawn anew each time it is played. If CHAOS_LOG names a
file, every fault adds a line with its kind.
"""

import os
import pathlib
import random

from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import ladder

CRASHED, POISONED = 0.05, 0.01  # shares of the episodes
# What a poisoned episode is paid, whatever its answer was.
POISONS = {"nan": float("nan"), "infinite": float("inf"), "huge": 1e9, "one": 1.0}


class Chaos(ladder.Ladder):
    """The tasks of configs/small_async_reverse.py, and of its evaluations."""

    def __init__(self, name: str = "reverse:3-6") -> None:
        """Opens the tasks."""
        super().__init__(name)

    def environment(self) -> protocol.Environment:
        """Returns an environment that may fail."""
        return _Faulty(super().environment())


class _Faulty:
    """Faults of episodes of training; evaluations must measure what was learnt."""

    def __init__(self, inner: protocol.Environment) -> None:
        self._inner, self._is_trained = inner, False

    async def reset(self, task: protocol.Task) -> tuple:
        self._is_trained = "/train/" in task.id
        return await self._inner.reset(task)

    async def step(self, message: dict) -> protocol.StepResult:
        result = await self._inner.step(message)
        drawn = random.random() if self._is_trained else 1.0
        if drawn < CRASHED:
            _log("crash")
            raise RuntimeError("the environment crashes, as one episode in twenty does")
        if drawn < CRASHED + POISONED:
            kind = random.choice(list(POISONS))
            _log(kind)
            return protocol.StepResult(
                (), protocol.Reward(POISONS[kind]), terminated=True, truncated=False
            )
        return result

    async def close(self) -> None:
        await self._inner.close()


def _log(kind: str) -> None:
    if path := os.environ.get("CHAOS_LOG"):
        with pathlib.Path(path).open("a") as file:
            file.write(f"{kind}\n")
