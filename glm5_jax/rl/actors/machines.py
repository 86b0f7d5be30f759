"""What works in a simulated run: engines that draw, and a step of training.

What is left of either advances at a rate that may change at any time. Times are exact,
those of events; nothing is divided into small steps.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable


class Engine:
    """Sequences that share an engine; `work` is what each active one has drawn.

    Attributes:
        end: time at which the next sequence ends.
        idle: seconds without an active sequence.
        area: seconds times active sequences.
    """

    def __init__(self, slots: int, step_seconds: Callable[[int], float]) -> None:
        """Begins at time 0 without a sequence; the arguments are those of `Speeds`."""
        self._slots, self._step_seconds = slots, step_seconds
        self._work = self._now = self._advanced = 0.0
        self._active: list[tuple[float, int, int]] = []  # ends at this work; order; id
        self._waiting: collections.deque[tuple[int, int, int]] = collections.deque()
        self._slowdown = 1.0  # by a step that runs
        self.idle = self.area = 0.0
        self.end = math.inf

    @property
    def num_assigned(self) -> int:
        """Returns the number of sequences, with those that wait for a slot."""
        return len(self._active) + len(self._waiting)

    @property
    def is_active(self) -> bool:
        """Returns whether it draws."""
        return bool(self._active)

    def add(self, order: int, id: int, tokens: int) -> None:
        """Begins a sequence, once it has a slot; `order` is that of equal ends."""
        self._waiting.append((tokens, order, id))
        self._fill()

    def advance(self, now: float) -> None:
        """Draws until now, for what was active since the last call."""
        if now == self._advanced:  # it may stand still from then on
            return
        self._advanced = now
        seconds, self._now = now - self._now, now
        if not self._active:
            self.idle += seconds
            return
        self.area += seconds * len(self._active)
        self._work += seconds / self._pace()

    def stand_still(self, seconds: float) -> None:
        """Moves the clock on without drawing."""
        self._now += seconds
        self._set_end()

    def slow_down(self, now: float, factor: float) -> None:
        """Draws until now as before, and from now on `factor` times as slowly."""
        if factor == self._slowdown:
            return
        self.advance(now)
        self._slowdown = factor
        self._set_end()

    def pop(self) -> int:
        """Removes the sequence that has ended, and returns its id."""
        work, _, id = heapq.heappop(self._active)
        self._work = max(self._work, work)
        self._fill()
        return id

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._slots:
            tokens, order, id = self._waiting.popleft()
            heapq.heappush(self._active, (self._work + tokens, order, id))
        self._set_end()

    def _set_end(self) -> None:
        if not self._active:
            self.end = math.inf
            return
        left = max(self._active[0][0] - self._work, 0.0)
        self.end = self._now + left * self._pace()

    def _pace(self) -> float:
        return self._step_seconds(len(self._active)) * self._slowdown


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of training that runs."""

    end: float
    slowdown: float = 1.0  # by engines that draw

    def slowed(self, now: float, factor: float) -> "Step":
        """Returns it with what is left from now on taking `factor` times as long."""
        left = (self.end - now) / self.slowdown
        return Step(now + left * factor, factor)
