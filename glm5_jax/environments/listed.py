"""Tasksets of a list of named tasks: which split a task is in, and their order.

`validate` writes what it finds about tasks of a folder into its file PROOFS. A task
that failed is not served; one without a proof is. The log tells how many.
"""

import abc
import copy
import functools
import hashlib
import pathlib
import random
from collections.abc import Mapping
from typing import Generic, TypeVar

from absl import logging

from glm5_jax import config
from glm5_jax.environments import ledger, protocol

PROOFS = "proofs.jsonl"
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
        proofs: pathlib.Path | None = None,
    ) -> None:
        """Splits the tasks.

        Args:
            name: of the taskset.
            by_id: what each task is made of, by its name.
            one_in: of so many groups one is held out.
            remedy: what to do if a split has no task, for the error.
            groups: of each task by its name; tasks of one group are in one split. None:
                each is one of its own.
            proofs: file of their proofs, which need not exist.
        """
        self.name, self.by_id, self._remedy = name, by_id, remedy
        self.proofs = proofs
        self._names: dict[str, list[str]] = {"train": [], "held_out": []}
        for key in sorted(by_id):
            digest = hashlib.sha256((groups[key] if groups else key).encode()).digest()
            split = "train" if digest[0] % one_in else "held_out"
            self._names[split].append(key)

    @abc.abstractmethod
    def task_of(self, made_of: T, /) -> protocol.Task:
        """Returns the task that is made of an entry of the list."""

    def whole(self) -> "Listed[T]":
        """Returns this taskset with the tasks that failed, to prove them again."""
        every = copy.copy(self)
        every.__dict__["_failed"] = frozenset()
        return every

    def size(self, split: str) -> int:
        """Returns the number of tasks of a split that are served."""
        return sum(name not in self._failed for name in self._names[split])

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; those of one seed repeat after all of a split were given.

        Raises:
            config.InputError: the split has no task.
        """
        size = self.size(split)
        if not size:
            raise config.InputError(
                f"{self.name} has no task in {split}; {self._remedy}."
            )
        turn, place = divmod(index, size)
        order = list(self._names[split])
        random.Random(f"{seed}/{split}/{turn}").shuffle(order)
        served = [name for name in order if name not in self._failed]
        return self.task_of(self.by_id[served[place]])

    @functools.cached_property
    def _failed(self) -> frozenset[str]:
        """Returns the tasks that failed their proof, and logs how many are proven."""
        known = ledger.verdicts(self.proofs) if self.proofs else {}
        found = {name: known[name] for name in self.by_id if name in known}
        failed = frozenset(name for name, is_proven in found.items() if not is_proven)
        count = len(self.by_id)
        if len(found) - len(failed) < count:
            logging.warning(
                f"{self.name}: {len(failed)} of {count} tasks failed their proof and "
                f"are left out; {count - len(found)} have none. `validate` proves "
                f"them, into {self.proofs or '--out'}."
            )
        return failed
