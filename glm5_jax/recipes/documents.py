"""Documents made by a function, in which most later tokens can be looked up earlier.

A small model learns to retrieve only if a large share of its targets asks for it. These
documents state facts once and repeat them in random order, so that every repetition is
a question: a text of a repeated order, pairs of a key and a value, and sentences that
hide among others, in the words of evaluation suite `needle`.
"""

import functools
import random
import string
from collections.abc import Callable, Iterator

from glm5_jax.evals import haystack
from glm5_jax.evals.suites import needle

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_LETTERS, _DIGITS = string.ascii_lowercase, string.digits
_MAX_PAIRS = 16
_MAX_NEEDLES, _BYTES_PER_NEEDLE = 8, 60
# Lengths of a key and of its value, in bytes.
_PAIR_SIZES = ((1, 1), (1, 2), (2, 2), (2, 1), (2, 3), (3, 3))
_JITTER = 8  # documents are shorter than the length by up to so many bytes

Make = Callable[[random.Random, int], str]


def repeated(rng: random.Random, length: int) -> str:
    """Returns a few random words in an order that repeats."""
    words = [
        "".join(rng.choices(_LETTERS + _DIGITS, k=rng.randint(1, 4)))
        for _ in range(rng.randint(3, 10))
    ]
    text = " ".join(words) + "\n"
    return (text * (length // len(text) + 1))[:length]


def pairs(rng: random.Random, length: int) -> str:
    """Returns pairs of a key and a value, then the same pairs in random order."""
    key_size, value_size = rng.choice(_PAIR_SIZES)
    size = key_size + value_size + 2
    most = min(length // size // 3, _MAX_PAIRS)
    keys = _distinct(
        rng.randint(2, max(2, most)),
        lambda: "".join(rng.choices(_LETTERS, k=key_size)),
    )
    facts = [f"{key}={''.join(rng.choices(_DIGITS, k=value_size))} " for key in keys]
    num_asked = (length - size * len(keys) - 2) // size
    return "".join([*facts, "? ", *rng.choices(facts, k=max(num_asked, 1))]).strip()


def needles(rng: random.Random, length: int) -> str:
    """Returns sentences with a number each among others, then some of them again."""
    most = max(1, min(_MAX_NEEDLES, length // _BYTES_PER_NEEDLE))
    names = _distinct(rng.randint(1, most), lambda: _name(rng))
    facts = [_sentence(name, rng.randint(1000, 9999)) for name in names]
    asked = rng.sample(facts, rng.randint(1, len(facts)))
    room = length - sum(map(len, facts + asked))
    lines: list[str] = []
    while len(line := rng.choice(haystack.NOISE)) <= room:
        lines.append(line)
        room -= len(line)
    for fact in facts:
        lines.insert(rng.randint(0, len(lines)), fact)
    return "".join(lines) + "".join(f"\n{fact.strip()}" for fact in asked)


def mixed(
    seed: int, *, length: int, count: int, weights: tuple[float, float, float]
) -> Iterator[str]:
    """Yields documents of at most about `length` bytes.

    Args:
      seed: of the whole sequence.
      length: bytes of the longest document.
      count: number of documents.
      weights: shares of `repeated`, `pairs` and `needles`.
    """
    rng = random.Random(f"{seed}:{length}")
    for make in rng.choices(_KINDS, weights, k=count):
        yield make(rng, length - rng.randint(0, _JITTER))


def maker(
    length: int, count: int, weights: tuple[float, float, float]
) -> Callable[[int], Iterator[str]]:
    """Returns `mixed` as a function of the seed alone."""
    return functools.partial(mixed, length=length, count=count, weights=weights)


_KINDS: tuple[Make, ...] = (repeated, pairs, needles)


def _sentence(name: str, number: int) -> str:
    return " " + needle.SHORT.needle.format(key=name, value=number)


def _name(rng: random.Random) -> str:
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(2))


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    """Returns `count` different results of `draw`, in their order."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)
