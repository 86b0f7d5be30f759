"""Log-likelihoods of continuations of prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glm5_jax.evals import record
from glm5_jax.inference import engine, scoring

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a prompt and its continuation


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation."""

    value: float  # nats
    is_greedy: bool | None  # whether every token is the likeliest; None: not asked


def of_pairs(
    subject: record.Subject, pairs: Sequence[Pair], with_greedy: bool = False
) -> list[Likelihood]:
    """Returns log p(continuation | prompt) of each pair.

    Args:
      subject: the model.
      pairs: no prompt and no continuation is empty.
      with_greedy: whether to compare each token with the likeliest one, which takes
        memory for all logits.

    Raises:
      InputError: a pair has more tokens than the model has positions.
    """
    longest = max(len(a) + len(b) for a, b in pairs)
    scoring.require_positions(longest, subject.config)
    limit = subject.config.max_position_embeddings
    shape = len(pairs), min(engine.bucket(longest), limit)
    names = ("tokens", "targets", "segment_ids", "positions")
    rows = {name: np.zeros(shape, np.int32) for name in names}
    mask = np.zeros(shape, np.float32)
    for i, (prompt, continuation) in enumerate(pairs):
        ids = [*prompt, *continuation]
        rows["tokens"][i, : len(ids)] = ids
        rows["targets"][i, : len(ids) - 1] = ids[1:]
        rows["segment_ids"][i, : len(ids)] = 1
        rows["positions"][i, : len(ids)] = np.arange(len(ids))
        mask[i, len(prompt) - 1 : len(ids) - 1] = 1
    logits = None
    if with_greedy:
        logits = np.empty((*shape, subject.config.vocab_size), np.float32)
    nll = scoring.score(subject.params, subject.config, rows, logits)
    values = (-(nll * mask).astype(np.float64).sum(axis=1)).tolist()
    if logits is None:
        return [Likelihood(value, None) for value in values]
    is_right = (logits.argmax(axis=-1) == rows["targets"]) | (mask == 0)
    greedy = is_right.all(axis=1).tolist()
    return [Likelihood(*given) for given in zip(values, greedy, strict=True)]
