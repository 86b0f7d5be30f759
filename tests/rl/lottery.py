"""Tasks whose rewards a random model earns; imports no jax."""

import asyncio
import copy
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


class Slow(Lottery):
    """Its environments think for 0.2 s."""

    def __init__(self):
        super().__init__(seconds=0.2)


class Patient(Lottery):
    """After some answers, those of training wait for an evaluation of eight tasks.

    With two groups of four a step and a staleness of 2, the first 48 answers are over
    only once the weights of step 3 are published: an evaluation of them has begun.
    """

    def __init__(self):
        super().__init__()
        self._left, self._held_out = 48, 8
        self._evaluated = asyncio.Event()
        self._shared = self

    def environment(self):
        return copy.copy(self)

    async def reset(self, task):
        self._is_held_out = "held_out" in task.id
        return await super().reset(task)

    async def step(self, message):
        shared = self._shared
        if self._is_held_out:
            shared._held_out -= 1
            if not shared._held_out:
                shared._evaluated.set()
        elif shared._left:
            shared._left -= 1
        else:
            await shared._evaluated.wait()
        return await super().step(message)
