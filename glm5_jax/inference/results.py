"""Writes the result of a dispatch into the completions of its requests."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from glm5_jax.inference import pages, steps
from glm5_jax.inference import scheduler as scheduler_lib

# Experts of the tokens that a slot read: pieces of rows, with the place of the first.
Pieces = list[tuple[int, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a dispatch, until the engine's state takes it in."""

    dispatch: scheduler_lib.Dispatch
    rows: list[int]  # of its parts, in the arrays of `drawn`
    state: steps.State
    drawn: steps.Drawn  # host arrays
    version: int  # of the weights that drew

    @property
    def ids(self) -> list[list[int]]:
        """Returns the tokens that were drawn for each part."""
        ids = self.drawn.ids.tolist()
        return [[i for i in ids[row] if i >= 0] for row in self.rows]


def write(
    result: Result,
    part: scheduler_lib.Part,
    row: int,
    new: list[int],
    pieces: Pieces,
) -> bool:
    """Writes what a part drew into its completion; a repetition changes nothing.

    Args:
      result: of the dispatch.
      part: of the dispatch.
      row: of the part in the arrays.
      new: tokens that it drew.
      pieces: of the part's slot, with the experts of the tokens before; extended.

    Returns:
      Whether the completion has ended.
    """
    drawn, completion, first = result.drawn, part.work.completion, part.num_drawn
    completion.tokens[first:] = new
    completion.logprobs[first:] = drawn.logprobs[row, : len(new)].tolist()
    completion.versions[first:] = [result.version] * len(new)
    completion.cache_versions[first:] = [part.slot.version] * len(new)
    if drawn.details is not None:
        rows = [x[row, : len(new)].tolist() for x in drawn.details]
        size = part.work.request.num_alternatives
        completion.raw_logprobs[first:] = rows[0]
        completion.alternatives[first:] = [
            [*zip(ids, logprobs, strict=True)][:size]
            for ids, logprobs in zip(*rows[1:], strict=True)
        ]
    if drawn.experts is not None:
        num_read = len(part.tokens) + len(new[:-1])
        read = np.asarray(drawn.experts)[:, row, :num_read].swapaxes(0, 1)
        _put(pieces, part.start, read)
    reason = _finish_reason(part.work)
    if part.work.tracker is not None:
        completion.error = part.work.tracker.error
    if reason is not None:
        completion.finish_reason = reason
        if drawn.experts is not None:
            completion.experts = np.concatenate([piece for _, piece in pieces])
    return reason is not None


def share(nodes: Sequence[pages.Node], pieces: Pieces) -> None:
    """Keeps the experts of shared pages for the sequences that will begin with them.

    Args:
      nodes: of a slot's first pages, whose tokens have been read.
      pieces: of the slot.
    """
    missing = [i for i, node in enumerate(nodes) if node.experts is None]
    if missing:
        read = np.concatenate([piece for _, piece in pieces])
        for i in missing:
            size = len(nodes[i].key)
            nodes[i].experts = read[i * size : (i + 1) * size]


def _finish_reason(work: scheduler_lib.Work) -> Literal["stop", "length"] | None:
    """Returns why a completion has ended, or None."""
    tokens, request = work.completion.tokens, work.request
    if tokens and tokens[-1] in request.stop_ids:
        return "stop"
    return "length" if len(tokens) == request.max_new_tokens else None


def _put(pieces: Pieces, start: int, new: np.ndarray) -> None:
    """Replaces rows from `start` on by these pieces, each at its own place."""
    while pieces and pieces[-1][0] >= start:
        pieces.pop()
    if pieces:
        first, piece = pieces[-1]
        pieces[-1] = first, piece[: start - first]
    pieces.append((start, new))
