"""Proves a service with the attempts of a taskset that is here, too.

A service tells no solutions. Where its taskset can be made here, too, the tasks of both
must be the same, and the attempts that are known here are played there.
"""

import json
from collections.abc import Sequence

from glm5_jax import config, messages
from glm5_jax.environments import proofs, protocol
from glm5_jax.environments.service import remote


class Through:
    """A taskset of this machine whose episodes a service plays."""

    has_agents = False

    def __init__(self, own: protocol.Taskset, service: remote.Remote) -> None:
        """Takes the two sides.

        Args:
            own: the taskset.
            service: of the same one.
        """
        self.name = own.name
        self.splits = protocol.splits(own)
        self._own, self._service = own, service
        self._there: dict[str, protocol.Task] = {}

    def size(self, split: str) -> int:
        """Returns the number of tasks of a split."""
        return self._service.size(split)

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task of both sides.

        Raises:
            config.InputError: they have different ones.
        """
        here = self._own.task(split, seed, index)
        there = self._service.task(split, seed, index)
        if _told(here) != _told(there):
            raise config.InputError(
                f"{self._service.name} has another task than {self.name} at "
                f"{split}/{seed}/{index}: {there.id!r} instead of {here.id!r}, or with "
                f"another text; serve the same taskset, of the same version."
            )
        self._there[here.id] = there
        return here

    def environment(self) -> "_Episode":
        """Returns an environment for one episode."""
        return _Episode(self._service.environment(), self._there)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns what the taskset here says."""
        return self._own.demonstration(task)

    def attempts(self, task: protocol.Task) -> proofs.Attempts | None:
        """Returns the attempts that the taskset here knows."""
        return proofs.attempts_of(self._own, task)

    def source_of(self, task: protocol.Task) -> str:
        """Returns what the taskset here says of its source."""
        return proofs.source_of(self._own, task)

    def scored_by(self, task: protocol.Task) -> str:
        """Returns what the taskset here says of its scoring."""
        return proofs.scored_by(self._own, task)


class _Episode:
    """An episode of a task that is here and there."""

    def __init__(self, inner: remote.Episode, there: dict[str, protocol.Task]) -> None:
        self._inner, self._there = inner, there

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        return await self._inner.reset(self._there[task.id])

    async def step(self, message: messages.Message) -> protocol.StepResult:
        return await self._inner.step(message)

    async def close(self) -> None:
        await self._inner.close()


def _told(task: protocol.Task) -> str:
    """Returns what a model is told of a task."""
    return json.dumps([task.id, [*task.messages], [*task.tools], task.tag])
