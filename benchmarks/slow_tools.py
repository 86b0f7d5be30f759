"""The calculator with tools that take their time, for benchmarks/async_rl.py.

Seconds of a call are lognormal, as those of real tools, cut to 0.05..2. They depend on
the task, the turn and SLOW_TOOLS_SEED alone. If SLOW_TOOLS_LOG names a file, every
episode adds a line with the characters and seconds of its turns.
"""

import asyncio
import hashlib
import json
import math
import os
import pathlib
import random

from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import ladder

MEDIAN, SIGMA, LEAST, MOST = 0.3, 1.0, 0.05, 2.0
NAME = "calculator_untold:2-3"
LOG, SEED = "SLOW_TOOLS_LOG", "SLOW_TOOLS_SEED"


def seconds_of(key: str) -> float:
    """Returns how long a call takes."""
    key = f"{os.environ.get(SEED, 0)}/{key}"
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    return min(max(rng.lognormvariate(math.log(MEDIAN), SIGMA), LEAST), MOST)


class Slow(ladder.Ladder):
    """The calculator's tasks with slow tools."""

    is_slow = True

    def __init__(self) -> None:
        """Opens the tasks."""
        super().__init__(NAME)
        self._num_made = 0

    def environment(self) -> protocol.Environment:
        """Returns an environment that waits before each answer."""
        self._num_made += 1
        return _Waiting(super().environment(), self.is_slow, self._num_made)


class Fast(Slow):
    """The same tasks without waiting."""

    is_slow = False


class _Waiting:
    def __init__(self, inner: protocol.Environment, is_slow: bool, number: int) -> None:
        self._inner, self._is_slow, self._number = inner, is_slow, number
        self._key, self._turns = "", []

    async def reset(self, task: protocol.Task) -> tuple:
        self._key = task.id
        return await self._inner.reset(task)

    async def step(self, message: dict) -> protocol.StepResult:
        key = f"{self._key}/{self._number}/{len(self._turns)}"
        seconds = seconds_of(key) if self._is_slow else 0.0
        size = len(message.get("content") or "") + len(
            json.dumps(message.get("tool_calls") or "")
        )
        self._turns.append([size, seconds])
        await asyncio.sleep(seconds)
        return await self._inner.step(message)

    async def close(self) -> None:
        if path := os.environ.get(LOG):
            with pathlib.Path(path).open("a") as file:
                file.write(json.dumps(self._turns) + "\n")
        await self._inner.close()
