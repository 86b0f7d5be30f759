"""Variable tracking: RULER's task of several hops (arXiv 2404.06654), in two wordings.

A chain gives a variable a value, then hands the value from one variable to the next;
the question asks for all variables that have it. RULER puts a solved example in front,
which is left out here, because short contexts have no room for it.
"""

import dataclasses
import functools
import itertools
import string
from collections.abc import Sequence

import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import answering, haystack, record

NUM_TOKENS = 30  # of an answer in RULER's words
_NOISE_LINE = "".join(haystack.NOISE) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracing:
    """A task of a chain with `hops` assignments after the first."""

    hops: int
    is_ruler: bool


def ruler_texts(value: str, count: int) -> tuple[str, str]:
    """Returns RULER's text before the haystack, and its question."""
    before = (
        "Memorize and track the chain(s) of variable assignment hidden in the "
        "following text.\n\n"
    )
    question = (
        f"\nQuestion: Find all variables that are assigned the value {value} in the "
        f"text above. Answer: According to the chain(s) of variable assignment in the "
        f"text above, {count} variables are assgined the value {value}, they are:"
    )
    return before, question


def ruler_chain(names: Sequence[str], value: str) -> list[str]:
    """Returns RULER's assignments."""
    pairs = itertools.pairwise(names)
    hops = [f" VAR {new} = VAR {old} " for old, new in pairs]
    return [f" VAR {names[0]} = {value}", *hops]


def task(
    tracing: Tracing,
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
    rng: np.random.Generator,
) -> record.Task:
    """Returns a task of exactly `length` tokens, with the room for its answer."""
    count = tracing.hops + 1
    if tracing.is_ruler:
        letters = [*string.ascii_uppercase]
        names = ["".join(rng.choice(letters, 5)) for _ in range(count)]
        value = haystack.number(rng, 5)
        chain = ruler_chain(names, value)
        before, question = ruler_texts(value, count)
        noise = (" " + _NOISE_LINE.strip() + "\n",)
    else:
        names, value = haystack.words(rng, count), haystack.number(rng, 4)
        chain = [f" The value of {names[0]} is {value}."]
        chain += [
            f" The value of {new} is that of {old}."
            for old, new in itertools.pairwise(names)
        ]
        before, question = "", f"\nThe value {value} is that of"
        noise = haystack.NOISE
    own = len(tokenizer.encode(" " + ", ".join(names))) + 2
    return haystack.task(
        tokenizer,
        length,
        texts=(before, question),
        needles=chain,
        filler=itertools.cycle(haystack.encoded(tokenizer, noise)),
        answers=names,
        max_new_tokens=max(own, NUM_TOKENS) if tracing.is_ruler else own,
        rng=rng,
    )


SHORT, RULER = Tracing(hops=2, is_ruler=False), Tracing(hops=4, is_ruler=True)
SUITES = (
    answering.suite(
        "variables",
        "The three variables that get a value in two hops.",
        functools.partial(task, SHORT),
    ),
    answering.suite(
        "ruler_vt",
        "The five variables that get a value in four hops.",
        functools.partial(task, RULER),
    ),
)
