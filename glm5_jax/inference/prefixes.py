"""Finds texts with the longest common prefix, by comparing token ids as bytes."""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

WORD = 4  # bytes per id


def encoded(tokens: Sequence[int]) -> bytes:
    """Encodes ids as big-endian 32-bit words, whose bytes sort as the ids do."""
    return np.asarray(tokens, ">u4").tobytes()


class Texts:
    """Texts in sorted order, so that those with a common prefix are neighbours."""

    def __init__(self, texts: Mapping[int, bytes]) -> None:
        """Takes encoded texts by key."""
        self._ordered = sorted((text, key) for key, text in texts.items())

    def remove(self, text: bytes, key: int) -> None:
        """Removes a text."""
        del self._ordered[bisect.bisect_left(self._ordered, (text, key))]

    def nearest(self, text: bytes) -> tuple[int, list[int]]:
        """Returns the length of the longest common prefix, and the keys that share it.

        Returns:
          Tokens and keys; 0 and all keys if no text begins with the same token.
        """
        at = bisect.bisect_left(self._ordered, (text,))
        near = self._ordered[max(at - 1, 0) : at + 1]
        size = max((common(text, other) for other, _ in near), default=0)
        beginning = text[: size * WORD]
        first = bisect.bisect_left(self._ordered, (beginning,))
        last = bisect.bisect_left(self._ordered, (beginning + b"\xff",))  # above any id
        return size, [key for _, key in self._ordered[first:last]]


def common(a: bytes, b: bytes) -> int:
    """Returns the tokens of the longest common prefix."""
    size = min(len(a), len(b)) // WORD
    x, y = (np.frombuffer(text, np.uint32, size) for text in (a, b))
    different = np.flatnonzero(x != y)
    return int(different[0]) if different.size else size
