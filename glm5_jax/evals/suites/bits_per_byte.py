"""Bits per byte of held-out text, of each domain and of all."""

import math
from collections.abc import Iterator

import numpy as np

from glm5_jax.evals import held_out, record
from glm5_jax.inference import scoring

_BATCHES = 4  # of scoring.BATCH_TOKENS, between two moves of the progress bar


def _answer(
    subject: record.Subject, setting: record.Setting, tasks: record.Tasks
) -> Iterator[tuple[int, record.Answer]]:
    """Yields bits and bytes of each row, for its domain and for the whole."""
    size = max(1, _BATCHES * scoring.BATCH_TOKENS // setting.length)
    for numbers, rows, batch in held_out.batches(tasks, min(size, len(tasks) or 1)):
        nll = scoring.score(subject.params, subject.config, batch)
        bits = (nll * batch["loss_mask"]).astype(np.float64).sum(axis=1) / math.log(2)
        sizes = batch["num_bytes"].sum(axis=1)
        for i, (number, row) in enumerate(zip(numbers, rows, strict=True)):
            pair = float(bits[i]), float(sizes[i])
            yield number, record.Answer({"all": pair, row.domain: pair})


SUITE = record.Suite(
    name="bits_per_byte",
    asks="Bits per byte of held-out text, of each domain and of all.",
    tasks=held_out.rows,
    rows_per_task=1,
    answer=_answer,
    needs=frozenset({"tokenizer"}),
)
