"""Admits groups of episodes, and gives each to exactly one step, never too stale.

    running --finish--> ready --take--> in flight --commit--> done
       |                  ^                 |
       +--drop      drop--+-----rewind------+

A group is the episodes of one task; its index tells which. Version v are the weights
after v steps. A group that begins with version v may be learnt from by steps v to
v + max_staleness. That needs no group to be thrown away:

1. Groups begin only while those that were not dropped number fewer than
   (max_staleness + version + 1) * batch_size (the capacity of AReaL, arXiv 2505.24298).
   A step that took fewer than batch_size counts as if it had taken that many.
2. A step takes the oldest of the finished groups.
3. A step waits while the groups that it would leave could not all be taken in time by
   the steps after it, batch_size each, the oldest first.

The wait ends: by 1, the groups of versions up to v fit into the steps up to
v + max_staleness, and once all of them have finished, the step takes the oldest, which
leaves no more than fit into the steps after it. A group that waits before its first
token may take each new version (`renew`), which leaves fewer of the old ones. With
max_staleness 0 every step waits for all of its groups, and none runs during an update.

So a group is too old for its step only if its engine drew with weights from before its
beginning, which is a fault. Such a group is dropped, and another takes its place.

A step's groups are in flight until a checkpoint holds what they taught. If the trainer
is killed, `rewind` makes them ready again.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass
class _Group(Generic[T]):
    """A group that is not done."""

    version: int  # of the weights as it began
    oldest: int  # of those that drew its tokens, once it has finished
    content: T | None = None  # None: it runs
    step: int | None = None  # that learns from it


class Groups(Generic[T]):
    """The groups of a run; every call is quick, and one thread makes them."""

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        saved: dict[str, Any] | None = None,
        max_dropped: float | int = math.inf,
    ) -> None:
        """Begins, or continues from what `state` returned.

        Groups that were not done begin again, before new ones.

        Args:
          batch_size: groups of a step.
          max_staleness: most versions between a group's beginning and its step.
          saved: of a checkpoint.
          max_dropped: groups dropped while a step waits, after which it takes fewer.
        """
        self.batch_size, self.max_staleness = batch_size, max_staleness
        self._max_dropped, self._num_dropped = max_dropped, 0  # since the last step
        saved = saved or {"version": 0, "next": 0, "again": [], "counts": {}}
        self.version: int = saved["version"]
        self._next: int = saved["next"]
        self._again = collections.deque(saved["again"])
        self._counts = collections.Counter(saved["counts"])
        # Oldest first: indices that begin again have no order of their own.
        self._groups: dict[int, _Group[T]] = {}
        self._num_steps = self.version  # that have taken their groups

    @property
    def num_running(self) -> int:
        """Returns the number of groups that have begun and not finished."""
        return sum(group.content is None for group in self._groups.values())

    @property
    def num_ready(self) -> int:
        """Returns the number of finished groups that no step has taken."""
        return len(self._ready())

    def begin(self) -> int | None:
        """Returns the index of the group to run next; None if none may begin now."""
        # What a step takes counts before its weights are published, and as a whole:
        # groups that began in the places that it left would be too old for the next.
        taken = self._num_steps * self.batch_size
        others = sum(group.step is None for group in self._groups.values())
        most = self.batch_size * (self.max_staleness + self.version + 1)
        if taken + others >= most or self._num_dropped >= self._max_dropped:
            return None
        if self._again:
            index = self._again.popleft()
        else:
            index, self._next = self._next, self._next + 1
        self._counts["begun"] += 1
        self._groups[index] = _Group(self.version, self.version)
        return index

    def resume(self, index: int, version: int) -> bool:
        """Lets a group of before a kill run on; call it before any `begin`.

        Args:
          index: of the group; call it for smaller ones first.
          version: of the weights with which it began.

        Returns:
          False if nothing is left to do: it is done, or was dropped.
        """
        if index in self._again:
            self._again.remove(index)
            self._counts["restarted"] -= 1  # as `state` had counted it
        elif index >= self._next:  # it began after the state was saved
            self._again.extend(range(self._next, index))
            self._next = index + 1
            self._counts["begun"] += 1
        else:
            return False
        self._groups[index] = _Group(version, version)
        return True

    def finish(self, index: int, content: T, oldest: int | None = None) -> None:
        """Makes a running group ready.

        Args:
          index: of the group.
          content: its episodes.
          oldest: version of the weights of its oldest token; by default that with which
            it began.
        """
        group = self._running(index)
        group.content = content
        group.oldest = group.version if oldest is None else oldest

    def drop_stale(self) -> list[tuple[int, T]]:
        """Drops the ready groups whose tokens the next step may not take.

        `ledger` counts them as dropped_stale.

        Returns:
          Them, with their indices.
        """
        dropped = []
        for index in self._ready():
            group = self._groups[index]
            if self.version - group.oldest > self.max_staleness:
                assert group.content is not None, "ready groups have their episodes"
                dropped.append((index, group.content))
                self._drop(index, "stale")
        return dropped

    def drop_ready(
        self, is_bad: Callable[[T], bool], reason: str
    ) -> list[tuple[int, T]]:
        """Drops the finished groups that are bad and in no step.

        A step waits for others, however many they are.

        Args:
          is_bad: tells of a group's content.
          reason: which `ledger` counts.

        Returns:
          Them, with their indices.
        """
        dropped = []
        for index in self._ready():
            content = self._groups[index].content
            assert content is not None, "ready groups have their episodes"
            if is_bad(content):
                dropped.append((index, content))
                del self._groups[index]
                self._counts[f"dropped_{reason}"] += 1
        return dropped

    def drop(self, index: int, reason: str) -> None:
        """Ends a running group that no step will learn from.

        Args:
          index: of the group.
          reason: which `ledger` counts.
        """
        self._running(index)
        self._drop(index, reason)

    def skip(self, index: int) -> None:
        """Ends a running group of which nothing was played.

        `ledger` counts it as dropped_paused; a step waits for another one.
        """
        self._running(index)
        del self._groups[index]
        self._counts["dropped_paused"] += 1

    def renew(self, index: int) -> None:
        """Lets a running group of which nothing was played begin with this version."""
        group = self._running(index)
        group.version = group.oldest = self.version

    def restart(self, index: int) -> None:
        """Ends a running group whose worker died; it begins again with new weights."""
        self._running(index)
        del self._groups[index]
        self._again.append(index)
        self._counts["restarted"] += 1

    def take(self) -> list[tuple[int, T]] | None:
        """Returns the groups of the next step, with their indices.

        Returns None until enough groups are ready, or too many were dropped, and later
        steps can take all others in time.

        Raises:
          RuntimeError: the step has its groups already; `publish` or `rewind` is next.
        """
        if self._num_steps > self.version:
            raise RuntimeError(f"step {self.version} has taken its groups already")
        ready = self._ready()
        is_enough = len(ready) >= self.batch_size
        if not (is_enough or self._num_dropped >= self._max_dropped):
            return None
        ready.sort(key=lambda index: (self._groups[index].version, index))
        taken = ready[: self.batch_size]
        if not self._can_leave_all_but(taken):
            return None
        self._num_dropped, self._num_steps = 0, self.version + 1
        batch = []
        for index in taken:
            group = self._groups[index]
            group.step = self.version
            assert group.content is not None, "ready groups have their episodes"
            batch.append((index, group.content))
        return batch

    def staleness(self, indices: Iterable[int]) -> int:
        """Returns how many versions the oldest of the groups is behind, at least 0."""
        versions = [self._groups[index].version for index in indices]
        return max([self.version - version for version in versions] + [0])

    def publish(self) -> int:
        """Counts the step whose groups were taken; returns the new version."""
        self.version += 1
        self._num_steps = max(self._num_steps, self.version)
        return self.version

    def commit(self, version: int) -> None:
        """Forgets the groups that a checkpoint of this version has learnt from."""
        done = [i for i, group in self._groups.items() if _is_before(group, version)]
        for index in done:
            del self._groups[index]
        self._counts["done"] += len(done)

    def rewind(self, version: int) -> None:
        """Goes back to a checkpoint; groups of later steps are ready again."""
        for group in self._groups.values():
            if group.step is not None and group.step >= version:
                group.step = None
        self.version = self._num_steps = version

    def ledger(self) -> dict[str, int]:
        """Returns the number of groups by what became of them.

        begun = running + ready + in_flight + done + restarted + every dropped_REASON
        """
        in_flight = sum(group.step is not None for group in self._groups.values())
        return {
            **self._counts,
            "running": self.num_running,
            "ready": self.num_ready,
            "in_flight": in_flight,
        }

    def state(self, version: int) -> dict[str, Any]:
        """Returns what a checkpoint of a version must keep; it fits JSON."""
        counts = collections.Counter(self._counts)
        learnt = [i for i, g in self._groups.items() if _is_before(g, version)]
        rest = [i for i in self._groups if i not in set(learnt)]
        counts["done"] += len(learnt)
        counts["restarted"] += len(rest)
        return {
            "version": version,
            "next": self._next,
            "again": [*rest, *self._again],
            "counts": dict(counts),
        }

    def _drop(self, index: int, reason: str) -> None:
        del self._groups[index]
        self._counts[f"dropped_{reason}"] += 1
        self._num_dropped += 1

    def _ready(self) -> list[int]:
        return [
            index
            for index, group in self._groups.items()
            if group.content is not None and group.step is None
        ]

    def _can_leave_all_but(self, taken: list[int]) -> bool:
        """Returns whether the steps after this one can take the others in time."""
        others = sorted(
            group.version
            for index, group in self._groups.items()
            if group.step is None and index not in taken
        )
        return all(
            self.version + 1 + place // self.batch_size <= version + self.max_staleness
            for place, version in enumerate(others)
        )

    def _running(self, index: int) -> _Group[T]:
        """Returns a running group.

        Raises:
          KeyError: none with this index runs.
        """
        group = self._groups[index]
        if group.content is not None:
            raise KeyError(index)
        return group


def _is_before(group: _Group, version: int) -> bool:
    """Returns whether the weights of a version have learnt from a group."""
    return group.step is not None and group.step < version
