"""Searches layers whose indexer can go, without training (IndexShare).

arXiv 2603.12201, training-free: begin with an indexer in every layer; let the layer
share the selection of an earlier one that raises the loss on a calibration text least;
repeat. GLM-5 keeps 40 of 78 indexers so. layerwise.py runs the patterns.
"""

import dataclasses
import pathlib
import sys

import tqdm

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.config import checks
from glm5_jax.evals import layerwise
from glm5_jax.inference import scoring

_LETTERS = {"own": "F", "shared": "S", "none": "-"}


@dataclasses.dataclass(frozen=True)
class Round:
    """A pattern of the search, and what it costs.

    Attributes:
        pattern: for model.index_topk_pattern.
        nats: mean loss of a calibration token.
        removed: layer whose indexer this round removed; None at the start.
        losses: mean loss without the indexer of each layer that could lose it, as
            pairs of layer and nats.
    """

    pattern: str
    nats: float
    removed: int | None = None
    losses: tuple[tuple[int, float], ...] = ()


def search(
    params: dict,
    config: config_lib.ModelConfig,
    rows: scoring.Rows,
    num_indexers: int,
    path: pathlib.Path | None = None,
) -> list[Round]:
    """Removes indexers one by one until `num_indexers` are left.

    Args:
      params: of the model, on one device.
      config: of the model, with sparse attention.
      rows: calibration rows, from `scoring.rows_of_text` or calibration.py.
      num_indexers: to keep, at least 1.
      path: JSON file of the finished rounds, from which a search resumes; None: none.

    Returns:
      The rounds, from the model as it is; the last one has the pattern to use.

    Raises:
      InputError: the model selects no keys, or the file is of another search.
    """
    length, owned = rows["tokens"].shape[1], sum(config.is_full_index_layer)
    checks.require(
        (
            config.attention == "sparse",
            f"IndexShare needs model.attention='sparse', got {config.attention!r}.",
        ),
        (
            config.index_topk < length,
            f"The rows of the calibration text must be longer than model.index_topk="
            f"{config.index_topk}, got {length} tokens: all keys would be selected.",
        ),
        (
            1 <= num_indexers <= owned,
            f"The indexers to keep must be 1 to {owned}, those that the model has; got "
            f"{num_indexers}.",
        ),
    )
    digest = layerwise.digest(params, config, rows)
    rounds = [_round(fields) for fields in layerwise.finished_rounds(path, digest)]
    stack = _stack(params, config, rows)
    if not rounds:
        pattern = "".join(_LETTERS[kind.index] for kind in depth.layer_kinds(config))
        rounds.append(Round(pattern, stack.losses([pattern])[pattern]))
        layerwise.write_rounds(path, digest, rounds)
    for _ in tqdm.tqdm(
        range(num_indexers, rounds[-1].pattern.count("F")),
        desc="IndexShare",
        unit=" layers",
        disable=not sys.stderr.isatty(),
    ):
        rounds.append(_next_round(stack, rounds[-1].pattern))
        layerwise.write_rounds(path, digest, rounds)
    # The file may have those of a search that kept fewer.
    return [one for one in rounds if one.pattern.count("F") >= num_indexers]


def _next_round(stack: layerwise.Stack, pattern: str) -> Round:
    """Removes the indexer whose loss is least; the earliest one among equals."""
    can_go = [i for i, letter in enumerate(pattern) if letter == "F"][1:]
    shorter = {i: f"{pattern[:i]}S{pattern[i + 1 :]}" for i in can_go}
    found = stack.losses([*shorter.values()])
    removed = min(can_go, key=lambda layer: found[shorter[layer]])
    return Round(
        pattern=shorter[removed],
        nats=found[shorter[removed]],
        removed=removed,
        losses=tuple((layer, found[shorter[layer]]) for layer in can_go),
    )


def _stack(
    params: dict, config: config_lib.ModelConfig, rows: scoring.Rows
) -> layerwise.Stack:
    """Returns the model's layers: F has an index of its own, S reads the shared one."""
    kinds = depth.layer_kinds(config)
    letters = [_LETTERS[kind.index] for kind in kinds]
    first = letters.index("F") + 1
    # A layer hands on its index only in a model that shares some.
    pattern = "".join(letters[:first] + [x.replace("F", "S") for x in letters[first:]])
    sharing = dataclasses.replace(config, index_topk_pattern=pattern)
    named = {
        "F": [kind._replace(index="own") for kind in kinds],
        "S": [kind._replace(index="shared") for kind in kinds],
        "-": kinds,
    }
    return layerwise.Stack(params, config, rows, named, built_with=sharing)


def _round(fields: dict) -> Round:
    """Returns a round of the file."""
    losses = tuple((layer, nats) for layer, nats in fields["losses"])
    return Round(**(fields | {"losses": losses}))
