"""Tasksets of a list of named tasks: which split a task is in, and their order."""

import abc
import hashlib
import random
from collections.abc import Mapping
from typing import Generic, TypeVar

from glm5_jax import config
from glm5_jax.environments import protocol

T = TypeVar("T")


class Listed(abc.ABC, Generic[T]):
    """A taskset of listed tasks, split by a hash and shuffled by a seed."""

    def __init__(
        self,
        name: str,
        by_id: Mapping[str, T],
        one_in: int,
        remedy: str,
        groups: Mapping[str, str] | None = None,
    ) -> None:
        """Splits the tasks.

        Args:
            name: of the taskset.
            by_id: what each task is made of, by its name.
            one_in: of so many groups one is held out.
            remedy: what to do if a split has no task, for the error.
            groups: of each task by its name; tasks of one group are in one split. None:
                each is one of its own.
        """
        self.name, self.by_id, self._remedy = name, by_id, remedy
        self._names: dict[str, list[str]] = {"train": [], "held_out": []}
        for key in sorted(by_id):
            digest = hashlib.sha256((groups[key] if groups else key).encode()).digest()
            split = "train" if digest[0] % one_in else "held_out"
            self._names[split].append(key)

    @abc.abstractmethod
    def task_of(self, made_of: T, /) -> protocol.Task:
        """Returns the task that is made of an entry of the list."""

    def size(self, split: str) -> int:
        """Returns the number of tasks of a split."""
        return len(self._names[split])

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; those of one seed repeat after all of a split were given.

        Raises:
            config.InputError: the split has no task.
        """
        names = self._names[split]
        if not names:
            raise config.InputError(
                f"{self.name} has no task in {split}; {self._remedy}."
            )
        turn, place = divmod(index, len(names))
        order = list(names)
        random.Random(f"{seed}/{split}/{turn}").shuffle(order)
        return self.task_of(self.by_id[order[place]])
