"""Tasks whose rewards a random model earns; imports no jax."""

import asyncio
import dataclasses

from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import ladder


class Lottery:
    """Tasks of another taskset; what is paid is chance, but the same every time."""

    def __init__(self, name="reverse_dense:2-3", seconds=0.0):
        """`seconds` is how long an environment thinks about an answer."""
        self.name, self._seconds = name, seconds
        self._tasks = ladder.Ladder(name)

    def task(self, split, seed, index):
        task = self._tasks.task(split, seed, index)
        return dataclasses.replace(task, pays_when_cut=True)

    def environment(self):
        return self

    def demonstration(self, task):
        return self._tasks.demonstration(task)

    async def reset(self, task):
        return task.messages

    async def step(self, message):
        await asyncio.sleep(self._seconds)
        total = sum(map(ord, message["content"])) % 5 / 4
        reward = protocol.Reward(total, {"luck": total})
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self):
        pass
