"""Scores rows of tokens with the weights of an engine, between two of its dispatches.

The log-probs are those of a whole forward pass, as in training (scoring.py). Rows of
about the same length share a pass, and few numbers of rows and lengths occur, because
each pair is a program.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import placement, requests, scoring

_GROWTH = 4  # a pass has 1, 4, 16, ... rows


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model says of the tokens of a row, from the second one on.

    Attributes:
      logprobs: of the tokens, each after those before it.
      alternatives: the likeliest tokens in their places, with log-probs; nothing unless
        they were asked for.
      ranks: of the tokens in their places, as far as they were asked for; 1 is the
        likeliest.
    """

    logprobs: list[float]
    alternatives: list[list[tuple[int, float]]]
    ranks: list[int]


def batches(
    rows: Sequence[Sequence[int]], config: config_lib.ModelConfig
) -> Iterator[list[int]]:
    """Yields the indices of rows that share a forward pass.

    Args:
      rows: of ids.
      config: of the model.
    """
    groups = collections.defaultdict(list)
    for index, row in enumerate(rows):
        groups[_length(row, config)].append(index)
    for length, indices in sorted(groups.items()):
        most = _most_rows(length)
        yield from (indices[i : i + most] for i in range(0, len(indices), most))


def of(
    engine: engine_lib.Engine,
    rows: Sequence[Sequence[int]],
    num_alternatives: int | None = None,
) -> tuple[list[Scores], int]:
    """Returns the scores of rows that share a forward pass, and the weights' version.

    Args:
      engine: whose weights are used.
      rows: of ids, each at least one; see `batches`.
      num_alternatives: likeliest tokens in each place; None finds no ranks either.

    Raises:
      InputError: an id is none of the vocabulary, or there are too many alternatives.
    """
    config = engine.config
    for row in rows:
        require_ids(row, config)
    if num_alternatives is not None:
        require_number(num_alternatives)
    length = max(_length(row, config) for row in rows)
    if length < 2:
        return [Scores([], [], []) for _ in rows], engine.version
    size = 1
    while size < len(rows):
        size *= _GROWTH
    size = min(size, _most_rows(length))
    tokens = np.zeros((size, length), np.int32)
    for place, row in enumerate(rows):  # a token's score sees nothing behind it
        tokens[place, : len(row)] = row
    out = None
    if num_alternatives is not None:
        most = min(requests.MAX_ALTERNATIVES, config.vocab_size)
        out = scoring.Alternatives.empty(size, length, most)
    params, mesh = engine.placed_params
    with placement.using(mesh):
        asked = scoring.rows_of_tokens(tokens, config)
        nll = scoring.score(params, config, asked, alternatives_out=out)
    found = []
    for place, row in enumerate(rows):
        end, others, ranks = len(row) - 1, list[list[tuple[int, float]]](), list[int]()
        if out is not None:
            ids = out.ids[place, :end, :num_alternatives].tolist()
            logprobs = out.logprobs[place, :end, :num_alternatives].tolist()
            columns = zip(ids, logprobs, strict=True)
            others = [[*zip(*pair, strict=True)] for pair in columns]
            ranks = out.ranks[place, :end].tolist()
        found.append(Scores((-nll[place, :end]).tolist(), others, ranks))
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


def require_number(num_alternatives: int) -> None:
    """Checks how many likeliest tokens are asked for.

    Raises:
      InputError: they are too many, or fewer than none.
    """
    if not 0 <= num_alternatives <= requests.MAX_ALTERNATIVES:
        raise config_lib.InputError(
            f"The number of likeliest tokens must lie in 0..{requests.MAX_ALTERNATIVES}"
            f", got {num_alternatives}."
        )


def _length(row: Sequence[int], config: config_lib.ModelConfig) -> int:
    """Returns the length to which a row is padded; one token alone needs no pass."""
    if len(row) < 2:
        return len(row)
    return min(engine_lib.bucket(len(row)), config.max_position_embeddings)


def _most_rows(length: int) -> int:
    return max(1, scoring.BATCH_TOKENS // length)
