"""The calculator with tools that take their time, for benchmarks/async_rl.py.

Seconds of a call are lognormal, as those of real tools, cut to 0.05..2. They depend on
the task, how often it was begun before, the turn and SLOW_TOOLS_SEED alone, so they are
known before a run.
"""

import asyncio
import collections
import hashlib
import math
import os
import random

from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import ladder

MEDIAN, SIGMA, LEAST, MOST = 0.3, 1.0, 0.05, 2.0
STEADY = 0.5
NAME = "calculator_untold:2-3"
SEED = "SLOW_TOOLS_SEED"


def seconds_of(task: str, before: int, turn: int) -> float:
    """Returns how long a call takes.

    Args:
      task: its id.
      before: how many episodes of the task began before this one.
      turn: of the episode, from 0 on.
    """
    key = f"{os.environ.get(SEED, 0)}/{task}/{before}/{turn}"
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    return min(max(rng.lognormvariate(math.log(MEDIAN), SIGMA), LEAST), MOST)


class Slow(ladder.Ladder):
    """The calculator's tasks with slow tools."""

    seconds: float | None = None  # of each call; None: see `seconds_of`

    def __init__(self) -> None:
        """Opens the tasks."""
        super().__init__(NAME)
        self._begun: collections.Counter[str] = collections.Counter()  # by task

    def environment(self) -> protocol.Environment:
        """Returns an environment that waits before each answer."""
        return _Waiting(super().environment(), self.seconds, self._begun)


class Steady(Slow):
    """The same tasks with tools that all take the same time."""

    seconds = STEADY


class _Waiting:
    def __init__(
        self,
        inner: protocol.Environment,
        seconds: float | None,
        begun: collections.Counter[str],
    ) -> None:
        self._inner, self._seconds, self._begun = inner, seconds, begun
        self._task, self._before, self._turn = "", 0, 0

    async def reset(self, task: protocol.Task) -> tuple:
        self._task, self._before = task.id, self._begun[task.id]
        self._begun[task.id] += 1
        return await self._inner.reset(task)

    async def step(self, message: dict) -> protocol.StepResult:
        seconds = self._seconds
        if seconds is None:
            seconds = seconds_of(self._task, self._before, self._turn)
        self._turn += 1
        await asyncio.sleep(seconds)
        return await self._inner.step(message)

    async def close(self) -> None:
        await self._inner.close()
