"""Multiple choice by log-likelihood, from a JSONL file.

A line is {"question": TEXT, "choices": [TEXT, ...], "answer": INDEX}. The model chooses
the text with the highest log-likelihood after the question: of the whole text in
`accuracy`, over its bytes in `accuracy_per_byte`, which does not prefer short ones.
"""

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.evals import likelihood, record
from glm5_jax.inference import scoring


class Question(NamedTuple):
    """A question with its choices, as ids."""

    prompt: list[int]
    choices: list[list[int]]
    sizes: list[int]  # bytes of the choices
    answer: int


def _tasks(setting: record.Setting, subject: record.Subject) -> list[Question]:
    """Reads the first num_tasks questions.

    Raises:
      InputError: the file cannot be read, or a line is no question.
    """
    path = pathlib.Path(setting.questions or "")
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise config_lib.InputError(f"{path} cannot be read: {error}.") from error
    lines = text.split("\n") if text else []  # not at U+2028, as splitlines
    tokenizer = subject.words
    found = []
    for number, line in enumerate(lines[: setting.num_tasks], start=1):
        question, choices, answer = _checked(line, f"{path}:{number}")
        found.append(
            Question(
                tokenizer.encode(question),
                tokenizer.encode_batch(choices),
                [len(text.encode()) for text in choices],
                answer,
            )
        )
    if not found:
        raise config_lib.InputError(f"{path} has no questions.")
    longest = max(len(q.prompt) + max(map(len, q.choices)) for q in found)
    scoring.require_positions(longest, subject.config)
    return found


def _checked(line: str, place: str) -> tuple[str, list[str], int]:
    """Returns question, choices and answer of a line."""
    try:
        entry: Any = json.loads(line)
        question, choices, answer = map(
            entry.__getitem__, ("question", "choices", "answer")
        )
        is_right = isinstance(question, str) and bool(question)
        is_right &= isinstance(choices, list) and len(choices) > 1
        is_right &= all(isinstance(text, str) and text for text in choices)
        if is_right and isinstance(answer, int) and 0 <= answer < len(choices):
            return question, choices, answer
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # refused below
    raise config_lib.InputError(
        f"{place} is no question; write one as "
        f'{{"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}}.'
    )


def _answer(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[int, record.Answer]]:
    """Yields whether the likeliest choice is the right one."""
    del setting
    size = 16  # questions between two moves of the progress bar
    for first in range(0, len(tasks), size):
        part = tasks[first : first + size]
        pairs = [(q.prompt, choice) for _, q in part for choice in q.choices]
        likelihoods = iter(likelihood.of_pairs(subject, pairs))
        for number, question in part:
            own = np.array([next(likelihoods).value for _ in question.choices])
            figures = {
                name: (_is_right(values, question), 1.0)
                for name, values in (
                    ("accuracy", own),
                    ("accuracy_per_byte", own / np.array(question.sizes)),
                )
            }
            yield number, record.Answer(figures)


def _is_right(values: np.ndarray, question: Question) -> float:
    """Returns 1 or 0; NaN, whose argmax is the first, for a model that diverged."""
    if not np.isfinite(values).all():
        return math.nan
    return float(np.argmax(values) == question.answer)


SUITE = record.Suite(
    name="multiple_choice",
    asks="The likeliest of several texts, from a JSONL file.",
    tasks=_tasks,
    answer=_answer,
    needs=frozenset({"tokenizer", "questions"}),
    is_share=True,
    has_length=False,
)
