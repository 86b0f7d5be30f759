"""Prompts of an exact number of tokens: needles at random places of a filler text.

Everything is put together by token ids, so that a prompt has the length asked for with
any tokenizer. Pieces begin with a blank or a new line, where tokenizers cut anyway.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.sources import documents
from glm5_jax.evals import record

# RULER's noise (arXiv 2404.06654), a sentence each.
NOISE = (
    *(" The grass is green.", " The sky is blue.", " The sun is yellow."),
    *(" Here we go.", " There and back again."),
)
_SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
_SENTENCE = re.compile(r"[^.!?]+[.!?]+(?:\s|$)")
_MIN_SENTENCE, _MAX_SENTENCE = 20, 200  # characters of a sentence of real text


def word(rng: np.random.Generator, syllables: int = 2) -> str:
    """Returns a word that can be spoken and that no text contains by itself."""
    return "".join(_SYLLABLES[i] for i in rng.integers(len(_SYLLABLES), size=syllables))


def words(rng: np.random.Generator, count: int, syllables: int = 2) -> list[str]:
    """Returns different words."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[word(rng, syllables)] = None
    return [*found]


def number(rng: np.random.Generator, digits: int) -> str:
    """Returns a number that begins with no zero."""
    return str(rng.integers(10 ** (digits - 1), 10**digits))


@functools.cache
def sentences() -> tuple[str, ...]:
    """Returns the sentences of Python's language reference, in a fixed order.

    They replace the essays that RULER downloads. None has a digit, so that no number
    stands there by chance.
    """
    found = []
    for document in documents.read_documents("python"):
        if document.name.startswith("topics/"):
            for sentence in _SENTENCE.findall(document.text):
                text = " ".join(sentence.split())
                is_plain = not re.search(r"[\d*=|`_]|--", text)
                if is_plain and _MIN_SENTENCE <= len(text) <= _MAX_SENTENCE:
                    found.append(f" {text}")
    return tuple(dict.fromkeys(found))


@functools.lru_cache(maxsize=8)
def encoded(
    tokenizer: tokenizer_lib.Tokenizer, pieces: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    """Returns the ids of each piece."""
    return tuple(tuple(ids) for ids in tokenizer.encode_batch(pieces))


def buried(
    needles: Sequence[Sequence[int]],
    filler: Iterator[Sequence[int]],
    room: int,
    rng: np.random.Generator,
) -> list[int]:
    """Returns exactly `room` ids: needles in their order, between pieces of filler.

    Each needle lies at a place of its own if there are enough, drawn uniformly from the
    borders of the pieces. The last piece of filler is cut where the room ends.

    Raises:
      InputError: the needles need more room.
    """
    size = sum(map(len, needles))
    require_room(size - room)
    pieces: list[Sequence[int]] = []
    left = room - size
    while left > 0:
        piece = next(filler)[:left]
        pieces.append(piece)
        left -= len(piece)
    borders = len(pieces) + 1
    is_crowded = borders < len(needles)
    places = rng.choice(borders, size=len(needles), replace=is_crowded)
    at: dict[int, list[Sequence[int]]] = {}
    for place, needle in zip(sorted(places.tolist()), needles, strict=True):
        at.setdefault(place, []).append(needle)
    parts = [
        part
        for place in range(len(pieces) + 1)
        for part in [*at.get(place, []), *pieces[place : place + 1]]
    ]
    return [*itertools.chain.from_iterable(parts)]


def require_room(missing: int) -> None:
    """Checks that a task fits its length.

    Raises:
      InputError: it has `missing` tokens too many.
    """
    if missing > 0:
        raise config_lib.InputError(
            f"The task has {missing} tokens more than its length allows; give a larger "
            f"length in --suite_lengths."
        )


def task(
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
    *,
    texts: tuple[str, str],
    needles: Sequence[str],
    filler: Iterator[Sequence[int]],
    answers: Sequence[str],
    max_new_tokens: int,
    rng: np.random.Generator,
) -> record.Task:
    """Returns a task of exactly `length` tokens, with the room for its answer.

    Args:
      tokenizer: of the model.
      length: of prompt and answer.
      texts: before the haystack, and after it: the question.
      needles: in the order in which they lie in the haystack.
      filler: pieces of the haystack, as ids.
      answers: texts that the answer must contain.
      max_new_tokens: room for the answer.
      rng: draws the needles' places.

    Raises:
      InputError: needles and texts need more tokens.
    """
    head, tail = map(tokenizer.encode, texts)
    room = length - len(head) - len(tail) - max_new_tokens
    middle = buried(tokenizer.encode_batch([*needles]), filler, room, rng)
    prompt = [*head, *middle, *tail]
    assert len(prompt) + max_new_tokens == length
    return record.Task(prompt, tuple(answers), max_new_tokens)
