"""Decides how many tokens each round drafts, by what is measured.

A round of k drafts draws 1 + a_1 + ... + a_k tokens in the mean, where a_i is the share
of rounds that accept the first i drafts; it costs what the clock says. The number with
the most tokens a second wins; 0, which needs no drafts, is one of the numbers. What a
round costs depends on the rows of its program, so each size is decided by itself.

The numbers never change what is drawn, so they may follow the clock (verification.py).
"""

import collections
import dataclasses
import statistics

import numpy as np
from absl import logging

from glm5_jax.inference import steps

_NUMBERS = (0, 1, 3, 7)  # each is a program of its own, so there are few
_MIN_JUDGED = 64  # drafts of a position, before anything is decided
_MIN_TIMED = 3  # dispatches of a number of drafts
_MAX_TIMED = 16  # latest dispatches whose median counts
_PROBE_EVERY = 64  # dispatches, after which another number is tried once
_WINDOW = 4096  # rounds whose acceptance counts
_MARGIN = 1.05  # a number must be better by this factor to replace another one
LOW, _MIN_LOW = 0.3, 256  # share of first drafts that calls for an alarm; drafts


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What became of drafts since an engine was made."""

    num_drafts: int = 0  # of a round, in the last dispatch
    rounds: int = 0  # of a sequence
    # By position: drafts that were judged, also those behind a rejected one; and those
    # of them that were kept.
    judged: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    is_low: bool = False  # whether fewer than LOW of the latest first drafts were kept

    @property
    def shares(self) -> tuple[float, ...]:
        """Returns the share of kept drafts, by position; NaN where none was judged."""
        pairs = zip(self.accepted, self.judged, strict=True)
        return tuple(a / n if n else float("nan") for a, n in pairs)

    @property
    def length(self) -> float:
        """Returns the tokens of a round, in the mean over those with all drafts."""
        return 1.0 + sum(share for share in self.shares if share == share)


class Drafter:
    """Counts what became of drafts, and chooses their number for the next dispatch.

    Attributes:
        numbers: of drafts that programs are compiled for, ascending.
    """

    def __init__(self, num_drafts: int, adapts: bool) -> None:
        """Starts without any measurement.

        Args:
          num_drafts: most drafts of a round.
          adapts: whether fewer may be drafted; otherwise it is always as many.
        """
        self.numbers = [num_drafts]
        if adapts:
            self.numbers = [n for n in _NUMBERS if n < num_drafts] + self.numbers
        self._most = num_drafts
        self._last = num_drafts
        self._rounds = 0
        self._judged = np.zeros(num_drafts, np.int64)
        self._accepted = np.zeros(num_drafts, np.int64)
        self._recent = np.zeros((2, num_drafts))  # judged, accepted
        self._was_low = False
        self._sizes: dict[int, _Size] = {}

    @property
    def is_on(self) -> bool:
        """Returns whether the engine can draft at all."""
        return self._most > 0

    @property
    def acceptance(self) -> Acceptance:
        """Returns the counts."""
        return Acceptance(
            num_drafts=self._last,
            rounds=self._rounds,
            judged=tuple(self._judged.tolist()),
            accepted=tuple(self._accepted.tolist()),
            is_low=self._is_low,
        )

    def choose(self, rows: int) -> int:
        """Returns the number of drafts for a dispatch of this many rows."""
        size = self._sizes.setdefault(rows, _Size(self._most))
        if len(self.numbers) == 1 or self._recent[0, 0] < _MIN_JUDGED:
            return self._most
        for number in reversed(self.numbers):
            if len(size.seconds.get(number, ())) < _MIN_TIMED:
                return number
        size.num_chosen += 1
        if size.num_chosen % _PROBE_EVERY == 0:
            others = [n for n in self.numbers if n != size.number]
            return others[size.num_chosen // _PROBE_EVERY % len(others)]
        best = max(self.numbers, key=lambda n: self._rate(size, n))
        if self._rate(size, best) > _MARGIN * self._rate(size, size.number):
            self._replace(size, rows, best)
        return size.number

    def record(
        self, rows: int, number: int, tally: steps.Tally, seconds: float
    ) -> None:
        """Counts a dispatch.

        Args:
          rows: of the program.
          number: of drafts in each round.
          tally: of the dispatch, on the host.
          seconds: that it took.
        """
        self._last, num_rounds = number, int(np.max(tally.rounds, initial=0))
        self._rounds += int(np.sum(tally.rounds))
        judged, accepted = np.sum(tally.judged, axis=0), np.sum(tally.accepted, axis=0)
        self._judged[:number] += judged
        self._accepted[:number] += accepted
        fade = np.maximum(1 - judged / _WINDOW, 0)
        self._recent[:, :number] *= fade
        self._recent[:, :number] += np.stack([judged, accepted])
        size = self._sizes.setdefault(rows, _Size(self._most))
        if number not in size.seconds:  # the first dispatch may have compiled
            size.seconds[number] = collections.deque(maxlen=_MAX_TIMED)
        elif num_rounds:
            size.seconds[number].append(seconds / num_rounds)
        if self._is_low and not self._was_low:
            self._was_low = True
            logging.warning(
                "Only %.0f%% of the first drafts are accepted. Multi-token prediction "
                "was not trained along with these weights, or not for such texts.",
                100 * self._share(0),
            )

    def renew(self) -> None:
        """Makes the next drafts count more than the last ones, for new weights."""
        most = np.maximum(self._recent[0] / _MIN_JUDGED, 1)
        self._recent /= most

    @property
    def _is_low(self) -> bool:
        return bool(self._recent[0, :1].sum() >= _MIN_LOW and self._share(0) < LOW)

    def _share(self, position: int) -> float:
        judged, accepted = self._recent[:, position]
        return float(accepted / judged) if judged else 0.0

    def _length(self, number: int) -> float:
        """Returns the tokens that a round draws in the mean."""
        return 1.0 + sum(self._share(i) for i in range(number))

    def _rate(self, size: "_Size", number: int) -> float:
        """Returns the tokens of a sequence in a second."""
        return self._length(number) / size.cost(number)

    def _replace(self, size: "_Size", rows: int, number: int) -> None:
        """Changes the number of drafts; tells the reason the first time."""
        if not size.is_told:
            ratio = size.cost(size.number) / size.cost(number)
            logging.info(
                f"{number} drafts a round for {rows} rows instead of {size.number}: a "
                f"round of {size.number} draws {self._length(size.number):.2f} tokens "
                f"and takes {ratio:.2f} times as long as one of {number}, which draws "
                f"{self._length(number):.2f}."
            )
        size.number, size.is_told = number, True


class _Size:
    """The measurements of programs with a number of rows."""

    def __init__(self, number: int) -> None:
        self.number = number  # of drafts, now
        self.num_chosen = 0
        self.is_told = False
        # Of a round, by the number of drafts; of the latest dispatches.
        self.seconds: dict[int, collections.deque[float]] = {}

    def cost(self, number: int) -> float:
        """Returns the seconds of a round."""
        return statistics.median(self.seconds[number])
