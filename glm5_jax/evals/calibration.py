"""Rows that searches of a model's layers compare patterns on, none of them held out."""

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data.rows import packing
from glm5_jax.data.sources import documents
from glm5_jax.evals import catalogue, record
from glm5_jax.inference import scoring

_SEED = 1  # of tasks; evaluations have 0


def rows_of_corpus(subject: record.Subject, length: int, num_rows: int) -> scoring.Rows:
    """Packs documents that the model was trained on, in a fixed random order.

    Args:
      subject: the model, and its corpus.
      length: tokens of a row.
      num_rows: rows, or fewer if the corpus is too short.

    Raises:
      InputError: the corpus cannot be read, or all of it is held out.
    """
    tokenizer, corpus = subject.words, subject.corpus
    every = documents.read_documents(corpus.source)
    if len(every) == 1:
        every = documents.parted(every[0], corpus.percent)
    ids: list[np.ndarray] = []
    for document in documents.shuffled(every, seed=0):
        if sum(len(x) for x in ids) >= num_rows * length:
            break
        if not documents.is_held_out(document.name, corpus.percent):
            ids.append(np.asarray(tokenizer.encode(document.text), np.int32))
    if not ids:
        raise config_lib.InputError(
            f"Every document of {corpus.source!r} is held out; give a source with more "
            f"documents."
        )
    packed = packing.pack(ids, eos_id=tokenizer.eos_id, sequence_length=length)
    return _stacked([packed[i] for i in range(min(num_rows, len(packed)))])


def rows_of_tasks(
    subject: record.Subject, suite: str, length: int, num_rows: int
) -> scoring.Rows:
    """Returns a row for each task: the prompt and its answer, which alone counts.

    The tasks are others than those of an evaluation with seed 0.

    Args:
      subject: the model.
      suite: name of a suite whose tasks have a prompt and answers, such as "needle".
      length: tokens of a row.
      num_rows: rows.

    Raises:
      InputError: there is no such suite, or its tasks have no answers.
    """
    [found] = catalogue.find([suite])
    setting = record.Setting(length=length, num_tasks=num_rows, seed=_SEED)
    tasks = found.tasks(setting, subject)
    if not all(isinstance(task, record.Task) for task in tasks):
        raise config_lib.InputError(
            f"Suite {suite} has no answers to calibrate on; name one that asks, such "
            f"as needle, or use rows_of_corpus."
        )
    return _stacked([_row(subject, task, length) for task in tasks])


def _row(subject: record.Subject, task: record.Task, length: int) -> packing.Row:
    """Returns a packed row whose mask has the tokens of the answer alone."""
    tokenizer = subject.words
    answer = tokenizer.encode(" " + ", ".join(task.answers))
    ids = np.asarray([*task.prompt, *answer], np.int32)
    assert ids.size <= length, "a task of a length has room for its answer"
    packed = packing.pack([ids], eos_id=tokenizer.eos_id, sequence_length=length)
    row = packed[0]
    is_answer = np.zeros(length, np.float32)
    is_answer[len(task.prompt) - 1 : ids.size - 1] = 1
    return row | {"loss_mask": row["loss_mask"] * is_answer}


def _stacked(rows: list[packing.Row]) -> scoring.Rows:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
