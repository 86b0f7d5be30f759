"""Groups of similar documents, by the cosine of their hashed TF-IDF vectors.

Words are tokens and pairs of neighbouring tokens. Memory is 4 KiB a document, and a
group costs one product of a matrix with a vector. Every machine finds the same groups:
weights are whole numbers, and products of the rounded vectors are exact in float32.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

_DIMS = 1024
_SCALE = 2048.0  # length of a vector: products stay below 2^24, exact in float32
_WORDS = 2**20  # hash values that the frequency of words is counted under
_PRIMES = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)


def vectors(documents: Sequence[Int[np.ndarray, " _"]]) -> Float[np.ndarray, "n d"]:
    """Returns a vector of whole numbers for each document's token ids.

    A word that occurs t times, in m of n documents, weighs log2(2 t) log2(2 n / m),
    both logarithms rounded down. Words are added up by the sign and place that their
    hashes name (Weinberger et al., arXiv 0902.2206).
    """
    counted = [np.unique(_words(ids), return_counts=True) for ids in documents]
    frequency = np.zeros(_WORDS, np.int64)
    for words, _ in counted:
        frequency[np.unique(_kind(words))] += 1
    rarity = _log2(2 * len(documents) // np.maximum(frequency, 1))
    found = np.zeros((len(documents), _DIMS), np.float32)
    for vector, (words, times) in zip(found, counted, strict=True):
        weights = _log2(2 * times) * rarity[_kind(words)]
        signed = np.where(words >> np.uint64(63), -weights, weights)
        places = (words >> np.uint64(32)) % np.uint64(_DIMS)
        total = np.bincount(places.astype(np.int64), signed, _DIMS)
        length = np.sqrt(np.sum(total * total))
        vector[:] = np.rint(total * (_SCALE / max(length, 1.0)))
    return found


def groups(
    found: Float[np.ndarray, "n d"], lengths: Sequence[int], capacity: int
) -> list[list[int]]:
    """Puts documents into rows: an unplaced one, and those most like it that fit.

    Args:
        found: from `vectors`.
        lengths: places that each document takes, at most `capacity`.
        capacity: places of a row.

    Returns:
        The documents of each row, the most similar ones first. The first one of a row
        is the first unplaced; among equally similar ones the first comes first.
    """
    sizes, rows = np.asarray(lengths, np.int64), []
    is_open = np.ones(sizes.size, bool)
    for seed in range(sizes.size):
        if not is_open[seed]:
            continue
        is_open[seed] = False
        row, room = [seed], capacity - int(sizes[seed])
        fitting = np.flatnonzero(is_open & (sizes <= room))
        if fitting.size:
            likeness = found[fitting] @ found[seed]
            for place in fitting[np.argsort(-likeness, kind="stable")].tolist():
                if sizes[place] <= room:
                    row.append(place)
                    room -= int(sizes[place])
                    is_open[place] = False
        rows.append(row)
    return rows


def _words(ids: Int[np.ndarray, " _"]) -> np.ndarray:
    """Returns the hashes of the tokens and of the pairs of neighbours."""
    with np.errstate(over="ignore"):
        single = (ids.astype(np.uint64) + np.uint64(1)) * _PRIMES[0]
        single ^= single >> np.uint64(29)
        pairs = (single[:-1] * np.uint64(3) + single[1:]) * _PRIMES[1]
        words = np.concatenate([single, pairs]) * _PRIMES[0]
    return words ^ (words >> np.uint64(31))


def _kind(words: np.ndarray) -> np.ndarray:
    """Returns the numbers that the frequencies of words are counted under."""
    return (words % np.uint64(_WORDS)).astype(np.int64)


def _log2(numbers: Int[np.ndarray, " _"]) -> Int[np.ndarray, " _"]:
    """Returns the logarithms of numbers from 1 to 2^53, rounded down, exactly."""
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64) - 1
