"""The order of rows of several sources in exact proportions.

In a stage, a source's share is its weight divided by the sum of weights. The order of
sources is not random: after any number of rows, each source is within one row of its
exact share (earliest deadline first on the windows of Baruah et al. 1996,
"Proportionate progress").
"""

import bisect
import dataclasses
import fractions
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from glm5_jax import config

_MAX_CYCLE = 100_000  # rows after which the order of sources repeats itself


@dataclasses.dataclass(frozen=True)
class Stage:
    """The weight of each source from row `first` on."""

    first: int
    weights: tuple[float, ...]


class Schedule:
    """The source of each row of a mixture, and which of its rows it is.

    After a change of weights, each source continues where it was.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """Plans all stages; the first begins at row 0.

        Raises:
            config.InputError: the weights need too long a cycle.
        """
        self._firsts = [stage.first for stage in stages]
        self._cycles = [_Cycle(shares(stage.weights)) for stage in stages]
        # How often each source was used before a stage.
        self._before = [np.zeros(len(stages[0].weights), np.int64)]
        for cycle, first, last in zip(
            self._cycles, self._firsts, self._firsts[1:], strict=False
        ):
            self._before.append(self._before[-1] + cycle.counts(last - first))

    def locate(self, index: int) -> tuple[int, int]:
        """Source of row `index`, and how many of its rows came before."""
        stage = bisect.bisect_right(self._firsts, index) - 1
        source, place = self._cycles[stage].locate(index - self._firsts[stage])
        return source, int(self._before[stage][source]) + place

    def counts(self, num_rows: int) -> Int[np.ndarray, " sources"]:
        """Returns how many of the first rows are of each source."""
        stage = bisect.bisect_right(self._firsts, num_rows) - 1
        used = self._cycles[stage].counts(num_rows - self._firsts[stage])
        return self._before[stage] + used


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers in the exact proportions of the weights.

    Raises:
        config.InputError: their sum is too large.
    """
    exact = [fractions.Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > _MAX_CYCLE:
        raise config.InputError(
            f"data.mixture_weights {tuple(weights)} are the proportions of whole "
            f"numbers whose sum is {sum(whole)}, which may be at most {_MAX_CYCLE}; "
            f"write them with fewer digits."
        )
    return tuple(whole)


def even_order(weights: Sequence[int]) -> Int[np.ndarray, " cycle"]:
    """Returns the source of each row of a cycle; each comes as often as its weight.

    Row m of a source of weight w of W is released at place floor(m W / w) and is due
    before place ceil((m + 1) W / w). Each place takes the released row that is due
    first. No deadline is missed, because the weights add up to W.
    """
    weight = np.array(weights, np.int64)
    total, used = int(weight.sum()), np.zeros(weight.size, np.int64)
    safe = np.maximum(weight, 1)
    order = np.empty(total, np.int64)
    for place in range(total):
        may = used * total < (place + 1) * weight
        deadline = -(-(used + 1) * total // safe)
        order[place] = np.argmin(np.where(may, deadline, np.inf))
        used[order[place]] += 1
    return order


class _Cycle:
    """A repeating order of sources."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = np.array(weights, np.int64)
        self._order = even_order(weights)
        # How often the source of each place comes before it in the cycle.
        self._ranks = np.zeros_like(self._order)
        for source in range(len(weights)):
            places = np.flatnonzero(self._order == source)
            self._ranks[places] = np.arange(places.size)

    def locate(self, index: int) -> tuple[int, int]:
        """Source of row `index`, and how many of its rows came before."""
        cycles, place = divmod(index, self._order.size)
        source = int(self._order[place])
        return source, int(cycles * self._weights[source] + self._ranks[place])

    def counts(self, num_rows: int) -> np.ndarray:
        """Returns how many of the first rows are of each source."""
        cycles, rest = divmod(num_rows, self._order.size)
        some = np.bincount(self._order[:rest], minlength=self._weights.size)
        return cycles * self._weights + some
