"""Tells when a figure of a kind of tasks has left its usual level."""

import array
import collections
import math
import zlib
from collections.abc import Sequence

from glm5_jax.rl import episodes as episodes_lib

LAST = 16  # groups that are compared with those before them
_KNOWN = 64  # groups before them, at least
_HORIZON = 128  # groups of which the usual level is about the mean
_SIGMAS = 6.0  # from it, and
FACTOR = 3.0  # its multiple or fraction, from which on it has left it
_SHORT, _LONG = 64, 16_384  # tokens: shorter answers are not compressed, nor the rest
_FEW = 4  # answers of a group that are compressed


class Level:
    """A positive figure of the groups of a tag, by its logarithm."""

    def __init__(self) -> None:
        """Begins without a group."""
        self._last = collections.deque[float](maxlen=LAST)
        self._num_known, self._mean, self._variance = 0, 0.0, 0.0  # of those before

    @property
    def now(self) -> float:
        """Returns the level of the last groups, 0 without any."""
        return math.exp(sum(self._last) / len(self._last)) if self._last else 0.0

    @property
    def usual(self) -> float:
        """Returns the level before them."""
        return math.exp(self._mean)

    def note(self, value: float) -> bool:
        """Notes a group's value; tells whether the level is not the usual one."""
        if len(self._last) == LAST:
            self._learn(self._last[0])
        self._last.append(math.log(value))
        if self._num_known < _KNOWN:
            return False
        away = abs(math.log(self.now) - self._mean)
        sigma = math.sqrt(self._variance / LAST)
        return away >= max(_SIGMAS * sigma, math.log(FACTOR))

    def _learn(self, value: float) -> None:
        self._num_known += 1
        rate = 1 / min(self._num_known, _HORIZON)
        off = value - self._mean
        self._mean += rate * off
        self._variance += rate * ((1 - rate) * off * off - self._variance)


def num_tokens(episode: episodes_lib.Episode) -> int:
    """Returns the number of tokens that were sampled."""
    return sum(sum(sample.mask) for sample in episode.samples)


def compressed(episodes: Sequence[episodes_lib.Episode]) -> float | None:
    """Returns to what share of their size long answers are compressed; None: no such.

    The less, the more a text repeats itself.
    """
    shares = []
    for episode in episodes:
        if num_tokens(episode) >= _SHORT and len(shares) < _FEW:
            ids = array.array("i")
            for sample in episode.samples:
                ids.extend(
                    token
                    for token, is_sampled in zip(
                        sample.tokens, sample.mask, strict=True
                    )
                    if is_sampled
                )
            packed = ids[:_LONG].tobytes()
            shares.append(len(zlib.compress(packed, 1)) / len(packed))
    return sum(shares) / len(shares) if shares else None
