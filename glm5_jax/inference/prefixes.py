"""Which texts begin most like another: token ids as bytes, compared as memory is."""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

_WORD = 4  # bytes of an id


def encoded(tokens: Sequence[int]) -> bytes:
    """Ids as bytes that are ordered as the ids are: of 32 bits, the highest first."""
    return np.asarray(tokens, ">u4").tobytes()


class Texts:
    """Some texts in order, so that those with a common beginning are neighbours."""

    def __init__(self, texts: Mapping[int, bytes]) -> None:
        """Texts of `encoded`, each with a key."""
        self._ordered = sorted((text, key) for key, text in texts.items())

    def remove(self, text: bytes, key: int) -> None:
        """Takes one out."""
        del self._ordered[bisect.bisect_left(self._ordered, (text, key))]

    def nearest(self, text: bytes) -> tuple[int, list[int]]:
        """Tokens of the longest beginning that any shares with this one, and which do.

        Returns:
          0 and all keys where no text begins with the same token.
        """
        at = bisect.bisect_left(self._ordered, (text,))
        near = self._ordered[max(at - 1, 0) : at + 1]
        size = max((_common(text, other) for other, _ in near), default=0)
        beginning = text[: size * _WORD]
        first = bisect.bisect_left(self._ordered, (beginning,))
        last = bisect.bisect_left(self._ordered, (beginning + b"\xff",))  # above any id
        return size, [key for _, key in self._ordered[first:last]]


def _common(a: bytes, b: bytes) -> int:
    """Tokens of the longest common beginning."""
    size = min(len(a), len(b)) // _WORD
    x, y = (np.frombuffer(text, np.uint32, size) for text in (a, b))
    different = np.flatnonzero(x != y)
    return int(different[0]) if different.size else size
