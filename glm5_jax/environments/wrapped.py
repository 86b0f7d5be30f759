"""A taskset around another one: what it does not change, the inner one says.

All that a taskset may tell of its tasks comes through (proofs.py), so that a task is
proven behind a wrapper as it is by itself.
"""

from collections.abc import Callable, Sequence

from glm5_jax import messages
from glm5_jax.environments import proofs, protocol


class Wrapped:
    """The tasks of a taskset; subclasses change them, or how they are played."""

    has_agents = False

    def __init__(
        self, name: str, of: str, make: Callable[[str], protocol.Taskset]
    ) -> None:
        """Makes the inner taskset.

        Args:
            name: of this one.
            of: name of the inner one.
            make: returns the taskset of a name.

        Raises:
            config.InputError: there is no such taskset.
        """
        self.name, self._inner = name, make(of)
        self.splits = protocol.splits(self._inner)
        if size := getattr(self._inner, "size", None):  # of a list of tasks
            self.size = size

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the taskset's task."""
        return self._inner.task(split, seed, index)

    def environment(self) -> protocol.Environment:
        """Returns the taskset's environment for one episode."""
        made = self._inner.environment()
        assert isinstance(made, protocol.Environment)
        return made

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns the taskset's demonstration."""
        return self._inner.demonstration(task)

    def attempts(self, task: protocol.Task) -> proofs.Attempts | None:
        """Returns the attempts that the taskset knows."""
        return proofs.attempts_of(self._inner, task)

    def source_of(self, task: protocol.Task) -> str:
        """Returns what the taskset says of a task's source."""
        return proofs.source_of(self._inner, task)

    def scored_by(self, task: protocol.Task) -> str:
        """Returns what the taskset says of a task's scoring."""
        return proofs.scored_by(self._inner, task)

    async def leaks(
        self, environment: protocol.Environment, task: protocol.Task
    ) -> Sequence[str]:
        """Returns what the taskset finds that an agent could read in an episode."""
        if isinstance(environment, WrappedEpisode):
            environment = environment.inner
        return await proofs.leaks(self._inner, environment, task)


class WrappedEpisode:
    """An episode around one of the inner taskset; subclasses change it."""

    def __init__(self, inner: protocol.Environment) -> None:
        """Takes the inner episode."""
        self.inner = inner

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Sets up the task and returns the first messages."""
        return await self.inner.reset(task)

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Answers a turn of the model."""
        return await self.inner.step(message)

    async def close(self) -> None:
        """Ends the episode."""
        await self.inner.close()
