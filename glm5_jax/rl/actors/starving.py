"""Names the kinds of tasks that steps learn nothing from for long.

Steps take the groups that are ready, so a tag can go unnoticed: its environments are
slower than all others, all of its groups are dropped for their equal rewards, or it is
paused (failing.py). Admission keeps a place for slow groups (groups.py), and so none is
passed over for ever; this says how long it takes.
"""

import collections
from collections.abc import Iterable

from absl import logging

_WARN_EVERY = 25  # steps without a group


class Starving:
    """The steps since each tag had a group in one, and what became of its others."""

    def __init__(self) -> None:
        """Knows no tag yet."""
        self._num_steps = 0
        self._last: dict[str, int] = {}  # number of steps as a tag had its last group
        self._lost: collections.defaultdict[str, collections.Counter[str]] = (
            collections.defaultdict(collections.Counter)
        )  # groups since then, by what became of them

    @property
    def longest(self) -> int:
        """Returns the most steps that a tag has been without a group."""
        return self._num_steps - min(self._last.values(), default=self._num_steps)

    def began(self, tag: str) -> None:
        """Notes a group that begins, or that would have."""
        self._last.setdefault(tag, self._num_steps)

    def lost(self, tag: str, reason: str) -> None:
        """Notes a group that no step learns from."""
        self._lost[tag][reason] += 1

    def took(self, tags: Iterable[str]) -> None:
        """Notes the groups of a step, by their tags; warns of a tag without any."""
        self._num_steps += 1
        for tag in tags:
            self._last[tag] = self._num_steps
            self._lost.pop(tag, None)
        for tag, last in self._last.items():
            steps = self._num_steps - last
            if steps and steps % _WARN_EVERY == 0:
                logging.warning(
                    "No group of the tag %r was in the last %d steps: %s.",
                    tag,
                    steps,
                    ", ".join(
                        f"{n} {why}" for why, n in sorted(self._lost[tag].items())
                    )
                    or "none has ended",
                )
