"""Lets groups wait until their part of a mixture has room for them (rl.concurrency).

A group begins as a whole, so it waits for as many places as it has episodes. Groups of
other parts begin past it, those of its own part after it. As a bound has room for a
group, one that waits has episodes of its part before it, and begins after they end.
Groups that go on after a kill wait in the same way.
"""

import collections
from collections.abc import Mapping, Sequence

from glm5_jax.rl import at_once
from glm5_jax.rl import episodes as episodes_lib

Jobs = Sequence[episodes_lib.Job]  # of one group


class Places:
    """The groups that wait, and the episodes that are under way."""

    def __init__(self, concurrency: Sequence[int]) -> None:
        """Begins without a group.

        Args:
          concurrency: most episodes under way of each part: see `Settings`.
        """
        self._most = concurrency
        self._waiting: dict[int, Jobs] = {}  # by index, oldest first
        self._of_parts: collections.Counter[int] = collections.Counter()
        self._of_tags: collections.Counter[str] = collections.Counter()

    @property
    def num_under_way(self) -> int:
        """Returns the number of episodes under way."""
        return self._of_tags.total()

    @property
    def of_tags(self) -> Mapping[str, int]:
        """Returns the number of episodes under way by tag, also where it is 0 now."""
        return dict(self._of_tags)

    @property
    def waiting(self) -> list[tuple[int, str]]:
        """Returns the indices of the groups that wait, and their tags."""
        return [(index, jobs[0].task.tag) for index, jobs in self._waiting.items()]

    def add(self, index: int, jobs: Jobs) -> None:
        """Lets a group wait."""
        self._waiting[index] = jobs

    def remove(self, index: int) -> None:
        """Forgets a group that waits."""
        del self._waiting[index]

    def begin(self) -> tuple[int, Jobs] | None:
        """Returns the first group that has room, whose episodes are now under way."""
        for index, jobs in self._waiting.items():
            part = at_once.part_of(self._most, jobs[0].task)
            most = self._most[part] if self._most else 0
            if most and self._of_parts[part] + len(jobs) > most:
                continue
            del self._waiting[index]
            self._of_parts[part] += len(jobs)
            self._of_tags[_tag_of(jobs[0])] += len(jobs)
            return index, jobs
        return None

    def ended(self, job: episodes_lib.Job) -> None:
        """Frees the place of an episode."""
        self._of_parts[at_once.part_of(self._most, job.task)] -= 1
        self._of_tags[_tag_of(job)] -= 1


def _tag_of(job: episodes_lib.Job) -> str:
    return job.task.tag or "untagged"
