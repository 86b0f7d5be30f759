"""Which of several alike answers: multi-round co-reference, after OpenAI's MRCR.

A conversation asks for many texts; two or four rounds ask for the same kind on the same
topic. The last turn asks for one of these again, by its number, with a code in front.
Score: without the code 0, else the similarity of the texts (difflib's ratio), as MRCR
scores. The answers are sentences of Python's language reference.
"""

import difflib
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import answering, haystack, record

_KINDS = ("poem", "riddle", "letter", "story", "song")
_ORDINALS = ("first", "second", "third", "fourth")
_MAX_TEXT = 60  # characters of an answer


def task(
    alike: int,
    tokenizer: tokenizer_lib.Tokenizer,
    length: int,
    rng: np.random.Generator,
) -> record.Task:
    """Returns a task with `alike` rounds of which one is asked for."""
    short = [text for text in haystack.sentences() if len(text) <= _MAX_TEXT]
    order = rng.permutation(len(short)).tolist()
    topic, *topics = haystack.words(rng, 200)
    kind, code = str(rng.choice(_KINDS)), haystack.number(rng, 4)
    asked = int(rng.integers(alike))
    own = [short[i] for i in order[:alike]]

    def shown(kind: str, topic: str, text: str) -> str:
        return f"\nUser: Write a {kind} about {topic}.\nAssistant:{text}"

    def others() -> Iterator[Sequence[int]]:
        for i in itertools.cycle(order[alike:]):
            other = str(rng.choice(_KINDS)), str(rng.choice(topics))
            yield tokenizer.encode(shown(*other, short[i]))

    wanted = f"{code}{own[asked]}"
    return haystack.task(
        tokenizer,
        length,
        texts=(
            "",
            f"\nUser: Say {code}, then repeat the {_ORDINALS[asked]} {kind} about "
            f"{topic}.\nAssistant:",
        ),
        needles=[shown(kind, topic, text) for text in own],
        filler=others(),
        answers=[wanted],
        max_new_tokens=len(tokenizer.encode(f" {wanted}")) + 2,
        rng=rng,
    )


def similarity(task: record.Task, text: str) -> float:
    """Returns the likeness of an answer that has the code in front, else 0."""
    [wanted] = task.answers
    said, code = text.strip(), wanted.split()[0]
    if not said.startswith(code):
        return 0.0
    first = said.partition("\n")[0].removeprefix(code).strip()
    return difflib.SequenceMatcher(
        None, first, wanted.removeprefix(code).strip()
    ).ratio()


SUITES = tuple(
    answering.suite(
        f"mrcr_{alike}",
        f"One of {alike} texts of the same kind and topic in a conversation.",
        functools.partial(task, alike),
        score=similarity,
    )
    for alike in (2, 4)
)
