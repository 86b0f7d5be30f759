"""Leaves the description of tools out of the prompt: "untold:terminal:cron_line".

The tools are there, and calls are answered as ever; demonstrations teach them. So the
prompt of a model with a small context has the task alone.
"""

import dataclasses
from collections.abc import Callable

from glm5_jax import config
from glm5_jax.environments import protocol, wrapped

PREFIX = "untold:"


class Untold(wrapped.Wrapped):
    """The tasks of a taskset, without their tools."""

    def __init__(self, name: str, make: Callable[[str], protocol.Taskset]) -> None:
        """Makes the taskset that is wrapped.

        Args:
            name: "untold:NAME".
            make: returns the taskset of NAME.

        Raises:
            config.InputError: the taskset does not exist, describes no tools, or brings
                agents of its own, which describe theirs.
        """
        super().__init__(name, name.removeprefix(PREFIX), make)
        if protocol.has_agents(self._inner):
            raise config.InputError(
                f"rl.environment={name!r}: {self._inner.name} is played by programs of "
                f"its own, which describe their tools; take it without {PREFIX}."
            )
        if not self._inner.task(self.splits[0], 0, 0).tools:
            raise config.InputError(
                f"rl.environment={name!r}: {self._inner.name} describes no tools; take "
                f"it without {PREFIX}."
            )

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the taskset's task without the tools."""
        return dataclasses.replace(self._inner.task(split, seed, index), tools=())
