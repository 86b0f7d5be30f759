"""Needles in a haystack: RULER's eight retrieval tasks, in its words and in short ones.

    suite = needle.suite("own", needle.Retrieval(num_keys=4), "Asks one of four keys.")
    texts = needle.documents(needle.Retrieval(), tokenizer, lengths=[128, 256], seed=1)

A needle says the value of a key; the question asks for the values of some keys. RULER's
words (arXiv 2404.06654) fill a short context, so small models are asked in short ones.
"""

import dataclasses
import functools
import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import answering, haystack, record

_LONG = 4096  # tokens from which keys get a third syllable, so that there are enough
_SPARE = 2  # tokens of an answer in short words beyond its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wording:
    """The texts of a task, in which {key}, {keys}, {value} and {kind} are filled in.

    Attributes:
      needle: sentence that gives a value.
      one: text before the haystack, and the question, for one value.
      many: the same for several.
      is_in_lines: whether noise and needles stand on lines of their own.
      digits: of a number.
      answer_tokens: least room for the answer, which may be longer in bytes.
    """

    needle: str
    one: tuple[str, str]
    many: tuple[str, str]
    is_in_lines: bool
    digits: int
    answer_tokens: int


SHORT = Wording(
    needle="The number of {key} is {value}.",
    one=("", "\nThe number of {keys} is"),
    many=("", "\nThe numbers of {keys} are"),
    is_in_lines=False,
    digits=4,
    answer_tokens=0,
)
RULER = Wording(  # data/synthetic/constants.py and niah.py of RULER
    needle="One of the special magic {kind}s for {key} is: {value}.",
    one=(
        "A special magic {kind} is hidden within the following text. Make sure to "
        "memorize it. I will quiz you about the {kind} afterwards.",
        "\nWhat is the special magic {kind} for {keys} mentioned in the provided text? "
        "The special magic {kind} for {keys} mentioned in the provided text is",
    ),
    many=(
        "Some special magic {kind}s are hidden within the following text. Make sure to "
        "memorize it. I will quiz you about the {kind}s afterwards.",
        "\nWhat are all the special magic {kind}s for {keys} mentioned in the provided "
        "text? The special magic {kind}s for {keys} mentioned in the provided text are",
    ),
    is_in_lines=True,
    digits=7,
    answer_tokens=128,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retrieval:
    """A retrieval task.

    Attributes:
      num_keys: keys that have needles.
      num_values: needles of each key.
      num_queries: keys that the question names.
      haystack: text around the needles: RULER's noise sentences, sentences of Python's
        language reference, or needles of other keys.
      key: kind of the keys.
      value: kind of the values.
      wording: the texts.
    """

    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    haystack: Literal["noise", "text", "needles"] = "noise"
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    wording: Wording = SHORT

    @property
    def asks_one(self) -> bool:
        """Returns whether the answer is one value."""
        return self.num_queries * self.num_values == 1


def suite(name: str, retrieval: Retrieval, asks: str) -> record.Suite:
    """Returns the suite of a retrieval task."""
    return answering.suite(
        name,
        asks,
        functools.partial(task, retrieval),
        is_share=retrieval.asks_one,
    )


def task(
    retrieval: Retrieval,
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
    rng: np.random.Generator,
) -> record.Task:
    """Returns a task of exactly `length` tokens, with the room for its answer.

    Raises:
      InputError: the needles and the question need more tokens.
    """
    wording, sep = retrieval.wording, _separator(retrieval)
    new_key = _new_words(retrieval, 2 + (length >= _LONG), rng)
    keys = [next(new_key) for _ in range(retrieval.num_keys)]
    values = [
        [_value(retrieval, rng) for _ in range(retrieval.num_values)] for _ in keys
    ]
    asked = rng.choice(len(keys), size=retrieval.num_queries, replace=False)
    answers = tuple(value for i in asked for value in values[i])
    before, question = wording.one if retrieval.asks_one else wording.many
    fill = functools.partial(str.format, kind=retrieval.value)
    named = fill(question, keys=_listed([keys[i] for i in asked]))
    needles = [
        sep + fill(wording.needle, key=key, value=value)
        for key, its in zip(keys, values, strict=True)
        for value in its
    ]
    rng.shuffle(needles)
    own = len(tokenizer.encode(" " + _listed(answers))) + _SPARE
    return haystack.task(
        tokenizer,
        length,
        texts=(fill(before), named),
        needles=needles,
        filler=_filler(retrieval, tokenizer, new_key, rng),
        answers=answers,
        max_new_tokens=max(own, wording.answer_tokens),
        rng=rng,
    )


def documents(
    retrieval: Retrieval,
    tokenizer: tokenizer_lib.Tokenizer,
    lengths: Sequence[int],
    seed: int,
) -> list[str]:
    """Returns texts to train on, one a length: a task and its answer.

    Their keys, values and places are drawn apart from those of every evaluation.

    Args:
      retrieval: the family.
      tokenizer: that counts the tokens.
      lengths: tokens of each text, of which the last few may be missing.
      seed: of the texts.
    """
    texts = []
    for i, length in enumerate(lengths):
        setting = record.Setting(length=length, seed=seed)
        rng = record.generator(repr(retrieval), setting, i, "training")
        made = task(retrieval, tokenizer, length, rng)
        texts.append(f"{tokenizer.decode(made.prompt)} {_listed(made.answers)}.")
    return texts


def _separator(retrieval: Retrieval) -> str:
    is_in_lines = retrieval.wording.is_in_lines and retrieval.haystack != "text"
    return "\n" if is_in_lines else " "


def _filler(
    retrieval: Retrieval,
    tokenizer: tokenizer_lib.Tokenizer,
    new_key: Iterator[str],
    rng: np.random.Generator,
) -> Iterator[Sequence[int]]:
    """Yields the pieces of the haystack without end, as ids."""
    if retrieval.haystack == "needles":
        for key in new_key:
            value = _value(retrieval, rng)
            needle = retrieval.wording.needle.format(
                kind=retrieval.value, key=key, value=value
            )
            yield tokenizer.encode(_separator(retrieval) + needle)
    if retrieval.haystack == "text":
        pieces = haystack.encoded(tokenizer, haystack.sentences())
        start = int(rng.integers(len(pieces)))
        yield from itertools.islice(itertools.cycle(pieces), start, None)
    noise = haystack.NOISE
    if retrieval.wording.is_in_lines:
        noise = ("\n" + "".join(noise).strip(),)
    yield from itertools.cycle(haystack.encoded(tokenizer, noise))


def _new_words(
    retrieval: Retrieval, syllables: int, rng: np.random.Generator
) -> Iterator[str]:
    """Yields different keys without end."""
    seen: set[str] = set()
    while True:
        key = _uuid(rng) if retrieval.key == "uuid" else haystack.word(rng, syllables)
        if retrieval.wording.is_in_lines and retrieval.key == "word":
            key = f"{key}-{haystack.word(rng, syllables)}"  # RULER: adjective-noun
        if key not in seen:
            seen.add(key)
            yield key


def _value(retrieval: Retrieval, rng: np.random.Generator) -> str:
    if retrieval.value == "uuid":
        return _uuid(rng)
    return haystack.number(rng, retrieval.wording.digits)


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def _listed(texts: Sequence[str]) -> str:
    """Returns texts as RULER lists keys: "a", "a, and b", "a, b, and c"."""
    if len(texts) == 1:
        return texts[0]
    return f"{', '.join(texts[:-1])}, and {texts[-1]}"
