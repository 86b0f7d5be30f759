"""Adjusts logits as a request asks, and reports more log-probs of its tokens.

Only engines whose limits say `with_adjustments` compile this. In such an engine the
requests that ask for nothing skip the work.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm5_jax.inference import requests

LEAST_PENALTY = 1e-6  # of repetition, as computed
_NO_ID = np.iinfo(np.int32).max  # padding: beyond any vocabulary, so it is dropped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjustments:
    """The wishes of each sequence, and its text, which penalties count tokens of."""

    biased_ids: Int[Array, "B n"]
    bias: Float[Array, "B n"]  # added to the logits of these ids
    presence: Float[Array, " B"]  # subtracted from each token that was drawn before
    frequency: Float[Array, " B"]  # the same, once for every time
    repetition: Float[Array, " B"]  # divides positive logits of tokens of the text
    num_alternatives: Int[Array, " B"]
    text: Int[Array, "B S"]  # prompt and drawn tokens
    prompt_size: Int[Array, " B"]


class Details(NamedTuple):
    """Log-probs in the model's own distribution, at temperature 1."""

    raw_logprobs: Float[Array, "*n"]  # of the drawn tokens
    alternatives: Int[Array, "*n K"]  # the likeliest tokens, in order
    logprobs: Float[Array, "*n K"]  # theirs


def make(
    asked: Sequence[tuple[requests.Request, Sequence[int]] | None], capacity: int
) -> Adjustments:
    """Returns the adjustments of requests.

    Args:
      asked: each request with the tokens that it has drawn; None is padding.
      capacity: most tokens of a sequence.
    """
    idle = requests.Request(0, (), 0), ()
    rows = [idle if row is None else row for row in asked]
    num_rows = len(rows)
    biased_ids = np.full((num_rows, requests.MAX_BIASED), _NO_ID, np.int32)
    bias = np.zeros((num_rows, requests.MAX_BIASED), np.float32)
    text = np.full((num_rows, capacity), _NO_ID, np.int32)
    for row, (request, drawn) in enumerate(rows):
        if request.logit_bias:
            size = len(request.logit_bias)
            biased_ids[row, :size] = [*request.logit_bias]
            bias[row, :size] = [*request.logit_bias.values()]
        if request.is_penalized:
            whole = [*request.prompt, *drawn]
            text[row, : len(whole)] = whole

    def column(name: str, dtype: type) -> Array:
        return jnp.asarray(np.array([getattr(r, name) for r, _ in rows], dtype))

    return Adjustments(
        biased_ids=jnp.asarray(biased_ids),
        bias=jnp.asarray(bias),
        presence=column("presence_penalty", np.float32),
        frequency=column("frequency_penalty", np.float32),
        # With less, logits would be infinite in float32.
        repetition=jnp.maximum(column("repetition_penalty", np.float32), LEAST_PENALTY),
        num_alternatives=column("num_alternatives", np.int32),
        text=jnp.asarray(text),
        prompt_size=jnp.asarray(np.array([len(r.prompt) for r, _ in rows], np.int32)),
    )


def apply(logits: Float[Array, "B V"], wishes: Adjustments) -> Float[Array, "B V"]:
    """Returns the logits with penalties, then with the bias.

    Presence and frequency follow OpenAI and count drawn tokens; repetition follows
    CTRL (Keskar et al. 2019, 4.1) and counts the prompt, too.
    """
    is_penalized = (
        (wishes.presence != 0) | (wishes.frequency != 0) | (wishes.repetition != 1)
    )
    logits = jax.lax.cond(
        jnp.any(is_penalized), lambda x: _penalized(x, wishes), lambda x: x, logits
    )
    return jax.lax.cond(
        jnp.any(wishes.biased_ids != _NO_ID),
        lambda x: x.at[_rows(x), wishes.biased_ids].add(wishes.bias, mode="drop"),
        lambda x: x,
        logits,
    )


def with_tokens(
    wishes: Adjustments, positions: Int[Array, " B"], ids: Int[Array, " B"]
) -> Adjustments:
    """Returns the adjustments with a new token at a position of each text."""
    rows = jnp.arange(len(ids))
    text = wishes.text.at[rows, positions].set(ids, mode="drop")
    return dataclasses.replace(wishes, text=text)


def details(
    logits: Float[Array, "B V"], ids: Int[Array, " B"], wishes: Adjustments
) -> Details:
    """Returns log-probs of the drawn ids and of the likeliest tokens.

    Args:
      logits: of the model, before any adjustment.
      ids: the drawn tokens.
      wishes: if nobody asks for alternatives, they are zeros.
    """
    total = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
    size = min(requests.MAX_ALTERNATIVES, logits.shape[1])

    def likeliest(logits: Array) -> tuple[Array, Array]:
        values, found = jax.lax.top_k(logits, size)
        return values - total[:, None], found

    def nothing(logits: Array) -> tuple[Array, Array]:
        # Made of the logits, so that both branches vary over the same devices.
        zeros = jnp.zeros_like(logits[:, :size])
        return zeros, zeros.astype(jnp.int32)

    is_asked = jnp.any(wishes.num_alternatives > 0)
    values, found = jax.lax.cond(is_asked, likeliest, nothing, logits)
    return Details(chosen - total, found, values)


def no_details(rows: int, num_steps: int, vocab_size: int) -> Details:
    """Returns zeros for `num_steps` tokens of each row."""
    shape = rows, num_steps, min(requests.MAX_ALTERNATIVES, vocab_size)
    return Details(
        jnp.zeros((rows, num_steps), jnp.float32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.float32),
    )


def _penalized(logits: Array, wishes: Adjustments) -> Array:
    size = logits.shape[1]

    def counts(ids: Array) -> Array:
        zeros = jnp.zeros(logits.shape, jnp.float32)
        return zeros.at[_rows(logits), ids].add(1, mode="drop")

    places = jnp.arange(wishes.text.shape[1])[None]
    is_drawn = places >= wishes.prompt_size[:, None]
    drawn = counts(jnp.where(is_drawn, wishes.text, size))
    repetition = wishes.repetition[:, None]
    lowered = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts(wishes.text) > 0, lowered, logits)
    logits -= wishes.presence[:, None] * (drawn > 0)
    return logits - wishes.frequency[:, None] * drawn


def _rows(logits: Array) -> Array:
    """Returns the index of each row, to go with ids [B, n]."""
    return jnp.arange(logits.shape[0])[:, None]
