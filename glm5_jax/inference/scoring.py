"""Scores given tokens: their log-likelihoods under a model."""

import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import collectives, losses
from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.rows import packing
from glm5_jax.inference import placement, weights
from glm5_jax.model import context as context_lib
from glm5_jax.model import invariance, transformer
from glm5_jax.quantization import shards
from pallas_kernels import loops

BATCH_TOKENS = 4096  # tokens of a forward pass
CHUNK_TOKENS = 1024  # tokens whose logits are in memory at once

Rows = dict[str, np.ndarray]  # stacked rows of data/rows/packing.py


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """The likeliest tokens after each position, to be filled by `score`.

    Attributes:
      ids: of the likeliest tokens, the likeliest first.
      logprobs: of these tokens.
      ranks: of the targets; 1 is the likeliest token.
    """

    ids: Int[np.ndarray, "rows T k"]
    logprobs: Float[np.ndarray, "rows T k"]
    ranks: Int[np.ndarray, "rows T"]

    @classmethod
    def empty(cls, rows: int, num_tokens: int, number: int) -> "Alternatives":
        """Returns room for `number` tokens at each position."""
        shape = rows, num_tokens, number
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        return cls(ids, logprobs, np.zeros((rows, num_tokens), np.int32))


def rows_of_tokens(
    tokens: Int[np.ndarray, "rows T"], config: config_lib.ModelConfig
) -> Rows:
    """Makes a document of each row; first tokens are not scored.

    Raises:
      InputError: there is nothing to score, or the model lacks an id.
    """
    if tokens.shape[1] < 2:
        raise config_lib.InputError(
            "A row must have at least two tokens, because the first is not scored."
        )
    require_ids(tokens, config)
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    return {
        "tokens": tokens.astype(np.int32),
        "targets": np.roll(tokens, -1, axis=1).astype(np.int32),
        "loss_mask": mask,
        "segment_ids": np.ones(tokens.shape, np.int32),
        "positions": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
    }


def require_ids(
    tokens: Int[np.ndarray, "rows T"], config: config_lib.ModelConfig
) -> None:
    """Checks that all ids are in the vocabulary, before a cast could wrap them.

    Raises:
      InputError: one is not.
    """
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= config.vocab_size:
        raise config_lib.InputError(
            f"Ids must lie in 0..{config.vocab_size - 1} (model.vocab_size), got "
            f"{least}..{most}."
        )


def require_positions(num_tokens: int, config: config_lib.ModelConfig) -> None:
    """Checks that a model has enough positions for a row.

    Raises:
      InputError: the row is too long.
    """
    limit = config.max_position_embeddings
    if num_tokens > limit:
        raise config_lib.InputError(
            f"Rows have {num_tokens} tokens, more than "
            f"model.max_position_embeddings={limit}; shorten them."
        )


def read_text(path: str) -> str:
    """Reads a text file.

    Raises:
      InputError: it cannot be read.
    """
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise config_lib.InputError(f"{path} cannot be read: {error}.") from error


def rows_of_text(
    text: str, tokenizer: tokenizer_lib.Tokenizer, sequence_length: int
) -> Rows:
    """Packs a text as one document, as in training: its last target is <|endoftext|>.

    Raises:
      InputError: the text is empty.
    """
    ids = np.asarray(tokenizer.encode(text), np.int32)
    if not ids.size:
        raise config_lib.InputError("The text is empty; there is nothing to score.")
    length = min(sequence_length, ids.size)
    packed = packing.pack([ids], eos_id=tokenizer.eos_id, sequence_length=length)
    rows = [packed[i] for i in range(len(packed))]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    sizes = np.array([len(piece) for piece in tokenizer.pieces])
    return stacked | {"num_bytes": sizes[stacked["targets"]] * stacked["loss_mask"]}


def score(
    params: dict,
    config: config_lib.ModelConfig,
    rows: Rows,
    logits_out: Float[np.ndarray, "rows T V"] | None = None,
    alternatives_out: Alternatives | None = None,
) -> Float[np.ndarray, "rows T"]:
    """Computes -log p(target) at every position, in nats.

    The devices of the mesh in use share the rows and the parameters.

    Args:
      params: of `transformer.table`.
      config: of the model.
      rows: tokens, targets and masks.
      logits_out: if given, filled with the logits of every position.
      alternatives_out: if given, filled; the targets' log-probs then come from the same
        logits as those of the likeliest tokens, and are equal where the tokens are.

    Raises:
      InputError: a row is longer than the model's positions.
    """
    tokens = rows["tokens"]
    require_positions(tokens.shape[1], config)
    mesh = placement.in_use()
    names = ("tokens", "targets", "segment_ids", "positions")
    size = min(len(tokens), max(1, BATCH_TOKENS // tokens.shape[1]))
    shares = placement.num_shares(mesh)
    size = -(-size // shares) * shares  # as many rows on every device
    nll = np.empty(tokens.shape, np.float32)
    with placement.using(mesh):
        params = weights.computed(params, config, mesh)
        for first in range(0, len(tokens), size):
            batch = [_take(rows[name], first, size) for name in names]
            part = slice(first, first + size)
            count = len(tokens[part])
            result, hidden = _score(params, config, *batch)
            nll[part] = placement.fetched(result)[:count]
            if logits_out is not None:
                logits = placement.fetched(_logits(params, config, hidden))
                logits_out[part] = logits[:count]
            if (out := alternatives_out) is not None:
                number, targets = out.ids.shape[-1], batch[1]
                found = placement.fetched(
                    _likeliest(params, config, hidden, targets, number)
                )
                ids, logprobs, own, ranks = (x[:count] for x in found)
                out.ids[part], out.logprobs[part], out.ranks[part] = (
                    ids,
                    logprobs,
                    ranks,
                )
                nll[part] = -own
    return nll


def summarize(rows: Rows, nll: Float[np.ndarray, "rows T"]) -> dict[str, Any]:
    """Returns the mean nats per token, and for a text the bits per byte."""
    mask = rows["loss_mask"]
    total, count = float(np.sum(nll * mask, dtype=np.float64)), int(mask.sum())
    summary = {"nll": total / count, "num_tokens": count}
    if "num_bytes" in rows:
        num_bytes = int(rows["num_bytes"].sum())
        bits = total / math.log(2)
        summary |= {
            "bits_per_byte": bits / num_bytes if num_bytes else None,
            "num_bytes": num_bytes,
        }
    return summary


def _take(array: np.ndarray, first: int, size: int) -> np.ndarray:
    """Returns rows first .. first + size, padded with zeros after the last one."""
    part = array[first : first + size]
    return np.pad(part, [(0, size - len(part)), (0, 0)])


@functools.partial(invariance.jit, static_argnames="config")
def _score(
    params: dict,
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T D"]]:
    """Computes the losses of a batch, and the states that its logits come from."""
    context = context_lib.make_context(config, segment_ids, positions)

    def local(
        params: dict, tokens: Array, targets: Array, context: context_lib.Context
    ) -> tuple[Array, Array]:
        out = transformer.forward(params, config, tokens, context=context)
        head = params["lm_head"]
        return losses.token_nll(out.hidden, head, targets, CHUNK_TOKENS), out.hidden

    specs = shards.specs(params, transformer.param_dims(config))
    arguments = specs, placement.ROWS, placement.ROWS, placement.ROWS
    run = collectives.on_shards(local, arguments, placement.ROWS)
    return run(params, tokens, targets, context)


@functools.partial(invariance.jit, static_argnames=("config", "number"))
def _likeliest(
    params: dict,
    config: config_lib.ModelConfig,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    number: int,
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"], Float[Array, "B T"], Array]:
    """Finds the likeliest tokens, the targets' log-probs and their ranks, in chunks."""

    def chunk(part: tuple[Array, Array]) -> tuple[Array, Array, Array, Array]:
        states, targets = part
        logits = transformer.logits(params, config, states)
        logprobs = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(logprobs, targets[:, None], axis=1)
        best, ids = lax.top_k(logprobs, number)
        return ids, best, own[:, 0], 1 + jnp.sum(logprobs > own, axis=1)

    count = targets.size
    size = min(CHUNK_TOKENS, count)
    padding = -count % size

    def chunked(array: Array) -> Array:
        flat = array.reshape(count, *array.shape[2:])
        flat = jnp.pad(flat, [(0, padding), *[(0, 0)] * (flat.ndim - 1)])
        return flat.reshape(-1, size, *flat.shape[1:])

    def joined(array: Array) -> Array:
        flat = array.reshape(-1, *array.shape[2:])[:count]
        return flat.reshape(*targets.shape, *flat.shape[1:])

    found = loops.map(chunk, (chunked(hidden), chunked(targets)))
    ids, best, own, ranks = (joined(array) for array in found)
    return ids, best, own, ranks


_logits = invariance.jit(transformer.logits, static_argnames="config")
