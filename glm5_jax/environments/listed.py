"""Tasksets of a list of named tasks: which split a task is in, and their order."""

import hashlib
import random
from collections.abc import Mapping

from glm5_jax import config


class Listed:
    """The names of tasks, split by a hash and shuffled by a seed."""

    def __init__(
        self, name: str, groups: Mapping[str, str], one_in: int, remedy: str
    ) -> None:
        """Splits the tasks.

        Args:
            name: of the taskset.
            groups: of each task by its name; tasks of one group are in one split.
            one_in: of so many groups one is held out.
            remedy: what to do if a split has no task, for the error.
        """
        self._name, self._remedy = name, remedy
        self._names: dict[str, list[str]] = {"train": [], "held_out": []}
        for key in sorted(groups):
            digest = hashlib.sha256(groups[key].encode()).digest()
            split = "train" if digest[0] % one_in else "held_out"
            self._names[split].append(key)

    def size(self, split: str) -> int:
        """Returns the number of tasks of a split."""
        return len(self._names[split])

    def pick(self, split: str, seed: int, index: int) -> str:
        """Returns a name; those of one seed repeat after all of a split were given.

        Raises:
            config.InputError: the split has no task.
        """
        names = self._names[split]
        if not names:
            raise config.InputError(
                f"{self._name} has no task in {split}; {self._remedy}."
            )
        turn, place = divmod(index, len(names))
        order = list(names)
        random.Random(f"{seed}/{split}/{turn}").shuffle(order)
        return order[place]
