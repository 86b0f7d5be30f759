"""Pauses tasks whose environments fail, and ends a run whose environments all do.

The groups of a tag that nearly always fail by their environment, as where a service of
it is down, are skipped for a while. One tag is always played: where nearly all groups
of a run fail, steps would go by without a group to learn from.
"""

import collections
import time

from absl import logging

_OF_A_TAG, _OF_ALL = 16, 64  # last groups that are looked at
_MOST = 15 / 16  # share of them that fail, from which on it is too much
PAUSE_SECONDS = 600.0


class FailingError(RuntimeError):
    """Raised if nearly all groups fail by their environment."""


class Failing:
    """What became of the last groups, by tag."""

    def __init__(self) -> None:
        """Begins without a group."""
        self._all: collections.deque[bool] = collections.deque(maxlen=_OF_ALL)
        self._tags: dict[str, collections.deque[bool]] = {}
        self._until: dict[str, float] = {}  # when a pause ends, by tag

    def is_paused(self, tag: str) -> bool:
        """Tells whether groups of a tag are to be skipped now."""
        return time.monotonic() < self._until.get(tag, 0.0)

    def pause(self, tag: str) -> bool:
        """Skips groups of a tag for a while; False if no other one would be played."""
        others = (other for other in self._tags if other != tag)
        if all(map(self.is_paused, others)):
            return False
        self._until[tag] = time.monotonic() + PAUSE_SECONDS
        return True

    def note(self, tag: str, reason: str) -> None:
        """Notes a group that was played.

        Args:
          tag: of its task.
          reason: why an episode failed, of a group that was lost by it; else "".

        Raises:
          FailingError: nearly all of the last groups failed.
        """
        groups = self._tags.setdefault(tag, collections.deque(maxlen=_OF_A_TAG))
        for some in (groups, self._all):
            some.append(bool(reason))
        if not reason:
            return
        if _are_too_many(self._all):
            failed = {tag: sum(some) for tag, some in self._tags.items() if any(some)}
            raise FailingError(
                f"the environments of {sum(self._all)} of the last {_OF_ALL} groups "
                f"failed, the last one by {reason}. Failed groups of the last "
                f"{_OF_A_TAG} of each tag: {failed}. Once the environment works, the "
                f"same command resumes the run."
            )
        if _are_too_many(groups) and self.pause(tag):
            logging.warning(
                "Groups of the tag %r are skipped for %g s: the environments of %d of "
                "its last %d failed, the last one by %s.",
                tag,
                PAUSE_SECONDS,
                sum(groups),
                _OF_A_TAG,
                reason,
            )


def _are_too_many(failed: collections.deque[bool]) -> bool:
    return len(failed) == failed.maxlen and sum(failed) >= _MOST * len(failed)
