"""Scores rows of tokens with the weights of an engine, between two of its dispatches.

The log-probs are those of a whole forward pass, as in training (scoring.py).
"""

from collections.abc import Sequence

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import placement, scoring


def of(
    engine: engine_lib.Engine, rows: Sequence[Sequence[int]]
) -> tuple[list[list[float]], int]:
    """Returns the log-probs of the rows' tokens, and the version of the weights.

    Args:
      engine: whose weights are used.
      rows: of ids, each at least one.

    Returns:
      For each row those from its second token on.

    Raises:
      InputError: an id is none of the vocabulary.
    """
    found: list[list[float]] = []
    for row in rows:
        require_ids(row, engine.config)
        found.append(_logprobs(engine, row))
    return found, engine.version


def require_ids(row: Sequence[int], config: config_lib.ModelConfig) -> None:
    """Checks that ids are in the vocabulary, before a cast could wrap them.

    Raises:
      InputError: one is not.
    """
    wrong = [id for id in row if not 0 <= id < config.vocab_size]
    if wrong:
        raise config_lib.InputError(
            f"Ids must lie in 0..{config.vocab_size - 1} (model.vocab_size), got "
            f"{wrong[0]}."
        )


def _logprobs(engine: engine_lib.Engine, row: Sequence[int]) -> list[float]:
    """Scores one row, padded to one of few lengths, each of which is a program."""
    if len(row) < 2:
        return []
    size = min(engine_lib.bucket(len(row)), engine.config.max_position_embeddings)
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(row)] = row  # what lies behind a token does not change its score
    params, mesh = engine.placed_params
    with placement.using(mesh):
        rows = scoring.rows_of_tokens(tokens, engine.config)
        nll = scoring.score(params, engine.config, rows)
    return (-nll[0, : len(row) - 1]).tolist()
