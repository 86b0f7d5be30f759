"""Words that occur most often: RULER's common and frequent words, in two wordings.

Common words: a few words occur many times, many others seldom. Frequent words: coded
words whose counts fall as 1 / rank^2; the most frequent one is noise, "...". RULER
(arXiv 2404.06654) puts a solved example before the common words, which is left out
here.
"""

import dataclasses
import functools
import itertools
import string
from collections.abc import Iterator

import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import answering, haystack, record

_LONG = 4096  # tokens from which RULER repeats words more often
_ALPHA, _ZETA = 2.0, np.pi**2 / 6  # zeta(2)
CODED = 3  # frequent words that are asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wording:
    """The texts of a task.

    Attributes:
      before: text before the words.
      question: text after them.
      answer_tokens: least room for the answer, which may be longer in bytes.
    """

    before: str
    question: str
    answer_tokens: int


COMMON_RULER = Wording(
    before="Below is a numbered list of words. In these words, some appear more often "
    "than others. Memorize the ones that appear most often.\n",
    question="\nQuestion: What are the 10 most common words in the above list? Answer: "
    "The top 10 words that appear most often in the list are:",
    answer_tokens=120,
)
FREQUENT_RULER = Wording(
    before="Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words.",
    question="\nQuestion: Do not provide any explanation. Please ignore the dots "
    "'....'. What are the three most frequently appeared words in the above coded "
    "text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:",
    answer_tokens=50,
)
SHORT = Wording(
    before="Words:", question="\nThe words that occur most often are", answer_tokens=0
)


def common(
    is_ruler: bool,
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
    rng: np.random.Generator,
) -> record.Task:
    """Returns a task of 10 common words, or in short words of 3."""
    wording = COMMON_RULER if is_ruler else SHORT
    num, often, seldom = (10, 6, 1) if is_ruler else (3, 4, 1)
    if is_ruler and length >= _LONG:
        often, seldom = 30, 3
    names = _fresh(rng, 3 if is_ruler else 2)
    wanted = [*itertools.islice(names, num)]
    room = _room(wording, wanted, tokenizer, length)

    def piece(i: int, word: str) -> list[int]:
        text = f" {i + 1}. {word}" if is_ruler else f" {word}"
        return tokenizer.encode(text if i or not is_ruler else text.strip())

    listed = wanted * often
    size = sum(len(piece(i, word)) for i, word in enumerate(listed))
    haystack.require_room(size - room)
    while size <= room:
        listed += [next(names)] * seldom
        last = range(len(listed) - seldom, len(listed))
        size += sum(len(piece(i, listed[i])) for i in last)
    rng.shuffle(listed)
    while True:
        ids = [x for i, word in enumerate(listed) for x in piece(i, word)]
        if len(ids) <= room:
            break
        rare = max(i for i, word in enumerate(listed) if word not in wanted)
        del listed[rare]
    while len(ids) < room:  # other rare words, the last one cut
        ids += piece(len(listed), next(names))[: room - len(ids)]
        listed.append("")
    return _task(wording, wanted, tokenizer, length, ids)


def frequent(
    is_ruler: bool,
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
    rng: np.random.Generator,
) -> record.Task:
    """Returns a task of the three most frequent coded words behind the noise."""
    wording = FREQUENT_RULER if is_ruler else SHORT
    letters, size = [*string.ascii_lowercase], 6 if is_ruler else 3
    vocab = max(length // 50, 2 * CODED + 2)
    coded: dict[str, None] = {}
    while len(coded) < vocab:
        coded["".join(rng.choice(letters, size))] = None
    ranked = ["...", *[*coded][1:]]
    wanted = ranked[1 : CODED + 1]
    room = _room(wording, wanted, tokenizer, length)
    pieces = tokenizer.encode_batch([f" {word}" for word in ranked])
    sizes = np.array([len(piece) for piece in pieces])
    counts = _counts(room, vocab)
    total = room
    while counts @ sizes > room or counts[CODED] == counts[CODED + 1]:
        total -= 1
        counts = _counts(total, vocab)
    order = np.repeat(np.arange(vocab), counts)
    rng.shuffle(order)
    ids = [i for rank in order for i in pieces[rank]]
    while len(ids) < room:  # noise, the last one cut
        ids += pieces[0][: room - len(ids)]
    return _task(wording, wanted, tokenizer, length, ids)


def _counts(num_words: int, vocab: int) -> np.ndarray:
    """Returns RULER's counts: n k^-2 / zeta(2), rounded down."""
    ranks = np.arange(1, vocab + 1, dtype=np.float64)
    return (num_words * ranks**-_ALPHA / _ZETA).astype(int)


def _fresh(rng: np.random.Generator, syllables: int) -> Iterator[str]:
    """Yields different words without end."""
    seen: set[str] = set()
    while True:
        word = haystack.word(rng, syllables)
        if len(seen) > 2000:  # far fewer than there are; then longer ones
            word += haystack.word(rng, 1)
        if word not in seen:
            seen.add(word)
            yield word


def _budget(
    wording: Wording, wanted: list[str], tokenizer: tokenizer_lib.Tokenizer
) -> int:
    own = len(tokenizer.encode(" " + ", ".join(wanted))) + 2
    return max(own, wording.answer_tokens)


def _room(
    wording: Wording,
    wanted: list[str],
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
) -> int:
    """Returns the tokens between the texts."""
    fixed = len(tokenizer.encode(wording.before) + tokenizer.encode(wording.question))
    room = length - fixed - _budget(wording, wanted, tokenizer)
    least = 8 * len(tokenizer.encode(" " + " ".join(wanted)))
    haystack.require_room(least - room)
    return room


def _task(
    wording: Wording,
    wanted: list[str],
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
    ids: list[int],
) -> record.Task:
    head, tail = tokenizer.encode(wording.before), tokenizer.encode(wording.question)
    prompt, new = [*head, *ids, *tail], _budget(wording, wanted, tokenizer)
    assert len(prompt) + new == length
    return record.Task(prompt, tuple(wanted), new)


SUITES = (
    answering.suite(
        "common_words",
        "The three words that occur four times, others once.",
        functools.partial(common, False),
    ),
    answering.suite(
        "ruler_cwe",
        "The ten words that occur most often, in a numbered list.",
        functools.partial(common, True),
    ),
    answering.suite(
        "frequent_words",
        "The three most frequent of coded words whose counts fall as 1 / rank^2.",
        functools.partial(frequent, False),
    ),
    answering.suite(
        "ruler_fwe",
        "The three most frequent coded words besides the dots.",
        functools.partial(frequent, True),
    ),
)
