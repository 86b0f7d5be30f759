"""Confidence intervals of means, of differences between paired runs, and of shares.

    intervals.mean_interval([0.52, 0.55, 0.51])
    intervals.paired_difference({0: 2.31, 1: 2.29}, {0: 2.35, 1: 2.36})
    intervals.proportion_interval(17, 20)

Every interval has two sides and covers the true value with probability `confidence` if
the values are independent; those of means also assume that they are near normal. Means
of fewer than two values have no interval: its ends are NaN.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
Values = Sequence[float | int] | np.ndarray


class Interval(NamedTuple):
    """An estimate, the ends of its interval, and the number of values behind it."""

    mean: float
    low: float
    high: float
    count: int


def mean_interval(values: Values, confidence: float = CONFIDENCE) -> Interval:
    """Returns the mean with Student's interval: mean +- t(n - 1) s / sqrt(n).

    Raises:
      ValueError: there are no values.
    """
    return ratio_interval(values, np.ones_like(values), confidence)


def paired_difference(
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    confidence: float = CONFIDENCE,
) -> Interval:
    """Returns the mean of ours - theirs over the seeds that both have.

    Args:
      ours: a value for each seed.
      theirs: a value for each seed.
      confidence: of the interval, which is Student's over the differences.

    Raises:
      ValueError: no seed is in both.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise ValueError(
            f"A paired difference needs seeds that both have, got {sorted(ours)} and "
            f"{sorted(theirs)}; run both with the same seeds."
        )
    return mean_interval([ours[seed] - theirs[seed] for seed in seeds], confidence)


def proportion_interval(
    successes: int, trials: int, confidence: float = CONFIDENCE
) -> Interval:
    """Returns a share with its score interval (Wilson 1927).

    Without trials the share is NaN and may be anything: 0 to 1.
    """
    if not trials:
        return Interval(math.nan, 0.0, 1.0, 0)
    share, z = successes / trials, float(special.ndtri((1 + confidence) / 2))
    centre = share + z**2 / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z**2 / trials
    # Rounding must not exclude a share of 0 or 1 that was seen.
    low = (centre - spread) / scale if successes else 0.0
    high = (centre + spread) / scale if successes < trials else 1.0
    return Interval(share, low, high, trials)


def ratio_interval(
    sums: Values, weights: Values, confidence: float = CONFIDENCE
) -> Interval:
    """Returns sum(sums) / sum(weights) with Student's interval over the parts.

    With the ratio r and residuals e_i = sums_i - r weights_i of n parts, the standard
    error is sqrt(n / (n - 1) sum e_i^2) / sum(weights), to first order (Cochran 1977,
    chapter 6). Equal weights give the mean and its usual interval.

    Args:
      sums: of each part, e.g. the bits of a document.
      weights: of each part, e.g. its bytes; not all 0.
      confidence: of the interval.

    Raises:
      ValueError: there are no parts.
    """
    parts, shares = np.asarray(sums, np.float64), np.asarray(weights, np.float64)
    count = len(parts)
    if not count:
        raise ValueError("An interval needs at least one value, got none.")
    ratio = float(parts.sum() / shares.sum())
    if count < 2:
        return Interval(ratio, math.nan, math.nan, count)
    squares = float(np.sum((parts - ratio * shares) ** 2))
    error = math.sqrt(count / (count - 1) * squares) / float(shares.sum())
    spread = float(special.stdtrit(count - 1, (1 + confidence) / 2)) * error
    return Interval(ratio, ratio - spread, ratio + spread, count)
