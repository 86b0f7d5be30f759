"""Losses of next tokens and of multi-token prediction, in float32.

Logits exist for `chunk_tokens` tokens at a time. As the loss is a scalar, the forward
pass computes its gradient too, chunk by chunk, and the backward pass only multiplies it
by the incoming factor (GLM-5 report 2.4: sequence-chunked head).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import collectives
from pallas_kernels import loops


def next_token_loss(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "d v"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk_tokens: int,
    z_weight: float = 0.0,
) -> Float[Array, ""]:
    """Returns sum w (-log softmax(hidden head)[target] + z_weight * logsumexp^2).

    Args:
      hidden: states after the last norm.
      head: output matrix [D, V], or this device's shard of it.
      targets: ids of the tokens to predict.
      weights: w of each token, e.g. `mean_weights`.
      chunk_tokens: tokens whose logits exist at once.
      z_weight: weight of the squared normaliser (PaLM, arXiv 2204.02311); 0 is off.
    """
    chunks = _chunked(chunk_tokens, hidden, targets, weights)
    total = _total(_head(head, hidden.dtype), z_weight, *chunks)
    return collectives.total(total, collectives.TOKENS)


def mean_weights(mask: Float[Array, "*n B T"]) -> Float[Array, "*n B T"]:
    """Returns the weights that make a sum over a batch the mean over its mask."""
    return mask / jnp.maximum(jnp.sum(mask, axis=(-2, -1), keepdims=True), 1)


def token_nll(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "d v"],
    targets: Int[Array, "B T"],
    chunk_tokens: int,
) -> Float[Array, "B T"]:
    """Returns -log softmax(hidden head)[target] of every token."""
    return -token_logprobs(hidden, head, targets, chunk_tokens=chunk_tokens)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "d v"],
    targets: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
) -> Float[Array, "B T"]:
    """Returns log softmax(hidden head / temperature)[target], differentiable.

    The backward pass recomputes the logits of each chunk.
    """
    head = _head(head, hidden.dtype)

    def chunk(states: Array, targets: Array) -> Array:
        logits = _logits(states, head) / temperature
        return _at(logits, targets) - _normaliser(logits)

    return _of_each(chunk, hidden, targets, chunk_tokens)


def token_entropies(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "d v"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int,
) -> Float[Array, "B T"]:
    """Returns -sum_v p log p, p = softmax(hidden head / temperature), differentiable.

    The backward pass recomputes the logits of each chunk.
    """
    head = _head(head, hidden.dtype)

    def chunk(states: Array, _: Array) -> Array:
        logits = _logits(states, head) / temperature
        surprise = _normaliser(logits)[:, None] - logits
        own = jnp.sum(jnp.exp(-surprise) * surprise, axis=-1)
        return collectives.total(own, collectives.WORDS)

    return _of_each(chunk, hidden, jnp.zeros(hidden.shape[:2]), chunk_tokens)


def mtp_loss(
    states: Float[Array, "k B T D"],
    head: Float[Array, "d v"],
    targets: Int[Array, "k B T"],
    weights: Float[Array, "k B T"],
    *,
    chunk_tokens: int,
) -> Float[Array, ""]:
    """Returns the mean of all MTP steps' losses (arXiv 2412.19437, section 2.2).

    Args:
      states: hidden states of the MTP steps k = 1, 2, ...
      head: output matrix [D, V], or this device's shard of it.
      targets: ids to predict in each step, see `mtp_targets`.
      weights: weight of each token in each step.
      chunk_tokens: tokens whose logits exist at once.
    """

    def step(total: Array, xs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        loss = next_token_loss(xs[0], head, *xs[1:], chunk_tokens=chunk_tokens)
        return total + loss, None

    zero = jnp.zeros((), jnp.float32)
    total, _ = loops.scan(step, zero, (states, targets, weights))
    return total / states.shape[0]


def mtp_rejection(
    states: Float[Array, "k B T D"],
    hidden: Float[Array, "B T D"],
    head: Float[Array, "d v"],
    weights: Float[Array, "k B T"],
    *,
    is_end_to_end: bool,
    chunk_tokens: int,
) -> Float[Array, ""]:
    """Returns the share of drafts that the main model rejects, the mean over steps.

    The draft of step k at token i is kept with probability a_k = sum_v min(p, q), where
    q is the step's distribution and p the main model's, after token i + k. The loss of
    a step is 1 - a_k, the total variation; end to end it is 1 - a_1 ... a_k, as a draft
    counts only after all drafts before it (Bebop, arXiv 2606.12370). p is constant.

    Args:
      states: hidden states of the MTP steps k = 1, 2, ...
      hidden: states of the main model, of whole rows.
      head: output matrix [D, V], or this device's shard of it.
      weights: weight of each token in each step, see `mtp_targets`.
      is_end_to_end: which of the two losses.
      chunk_tokens: tokens whose logits exist at once.
    """

    def step(carry: tuple, xs: tuple[Array, Array]) -> tuple[tuple, None]:
        total, before, judge = carry
        state, weight = xs
        judge = jnp.roll(judge, -1, axis=1)
        kept = _kept(state, judge, head, chunk_tokens)
        if is_end_to_end:
            kept = before = before * kept
        return (total + jnp.sum(weight * (1 - kept)), before, judge), None

    carry = jnp.zeros(()), jnp.ones(hidden.shape[:2]), lax.stop_gradient(hidden)
    (total, _, _), _ = loops.scan(step, carry, (states, weights))
    return collectives.total(total, collectives.TOKENS) / states.shape[0]


def _kept(
    draft: Float[Array, "B T D"],
    judge: Float[Array, "B T D"],
    head: Float[Array, "d v"],
    chunk_tokens: int,
) -> Float[Array, "B T"]:
    """Returns sum_v min(p, q) of every token, differentiable in q.

    The backward pass recomputes the logits of each chunk.
    """
    head = _head(head, draft.dtype)

    def chunk(draft: Array, judge: Array) -> Array:
        q, p = _logits(draft, head), _logits(judge, lax.stop_gradient(head))
        log_q, log_p = (x - _normaliser(x)[:, None] for x in (q, p))
        both = jnp.sum(jnp.exp(jnp.minimum(log_q, log_p)), axis=-1)
        return collectives.total(both, collectives.WORDS)

    return _of_each(chunk, draft, judge, chunk_tokens)


def mtp_targets(
    targets: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    num_steps: int,
) -> tuple[Int[Array, "k B T"], Float[Array, "k B T"]]:
    """Returns the ids that the MTP steps predict, and the weight of each.

    In step k, token i of a row predicts targets[i + k], with weight 0 where token i + k
    belongs to another document or is beyond the row.

    Args:
      targets: the token after each token.
      mask: weight of each target.
      segment_ids: number of each token's document.
      num_steps: number of MTP steps.
    """
    index, size = jnp.arange(targets.shape[1])[None], targets.shape[1]

    def step(k: int) -> tuple[Array, Array]:
        is_same = jnp.roll(segment_ids, -k, axis=1) == segment_ids
        counts = (index < size - k) & is_same
        return jnp.roll(targets, -k, axis=1), jnp.roll(mask, -k, axis=1) * counts

    ahead, weights = zip(*map(step, range(1, num_steps + 1)), strict=True)
    return jnp.stack(ahead), jnp.stack(weights)


def _of_each(
    function: Callable[[Array, Array], Array], x: Array, y: Array, chunk_tokens: int
) -> Float[Array, "B T"]:
    """Returns a number for each token [B, T] of x and y, a chunk of tokens at a time.

    `function` gets the tokens of all devices that share the vocabulary.
    """

    @jax.checkpoint
    def chunk(xs: tuple[Array, Array]) -> Array:
        return _own_rows(function(*_all_rows(xs)))

    found = loops.map(chunk, _chunked(chunk_tokens, x, y))
    shape = x.shape[:2]
    return found.reshape(-1)[: math.prod(shape)].reshape(shape)


def _chunked(size: int, *arrays: Array) -> tuple[Array, ...]:
    """Flattens tokens [B, T, ...] and cuts them into zero-padded chunks [n, size, ...].

    `size` counts the tokens of all devices that share the vocabulary.
    """
    num_tokens = math.prod(arrays[0].shape[:2])
    size = min(max(size // collectives.size(collectives.WORD_ROWS), 1), num_tokens)

    def cut(x: Array) -> Array:
        flat = x.reshape(num_tokens, *x.shape[2:])
        padding = [(0, -num_tokens % size)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, padding).reshape(-1, size, *flat.shape[1:])

    return tuple(map(cut, arrays))


def _head(head: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Returns the output matrix for this device's vocabulary shard."""
    return collectives.fetched(head, ("D", "V"), jnp.dtype(dtype).name)


def _all_rows(xs: Any) -> Any:
    """Gathers the tokens of all devices that share the vocabulary."""
    return jax.tree.map(lambda x: collectives.gather(x, collectives.WORD_ROWS, 0), xs)


def _own_rows(x: Array) -> Array:
    """Returns this device's part of what `_all_rows` gathered."""
    size = len(x) // collectives.size(collectives.WORD_ROWS)
    first = collectives.index(collectives.WORD_ROWS) * size
    return lax.dynamic_slice_in_dim(x, first, size)


def _logits(hidden: Array, head: Array) -> Array:
    """Returns a chunk's float32 logits on this device's vocabulary shard."""
    head = head.astype(hidden.dtype)
    return jnp.einsum("td,dv->tv", hidden, head, preferred_element_type=jnp.float32)


def _normaliser(logits: Array) -> Array:
    """Returns the log-sum-exp over the whole vocabulary."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    if collectives.size(collectives.WORDS) == 1:
        return norm
    top = collectives.largest(norm, collectives.WORDS)
    return top + jnp.log(collectives.total(jnp.exp(norm - top), collectives.WORDS))


def _rows_and_words(logits: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Returns row, column and presence of targets on this device's vocabulary shard."""
    words = targets - collectives.index(collectives.WORDS) * logits.shape[1]
    is_here = (words >= 0) & (words < logits.shape[1])
    return jnp.arange(targets.size), words * is_here, is_here


def _at(logits: Array, targets: Array) -> Array:
    """Returns the targets' logits."""
    rows, words, is_here = _rows_and_words(logits, targets)
    return collectives.total(
        jnp.where(is_here, logits[rows, words], 0), collectives.WORDS
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(
    head: Array, z_weight: float, hidden: Array, targets: Array, mask: Array
) -> Array:
    """Returns the sum over all chunks of the weighted losses.

    Devices that share the vocabulary compute the losses of all their tokens together,
    and each returns an equal part of the sum.
    """

    def chunk(total: Array, xs: tuple) -> tuple[Array, None]:
        hidden, targets, mask = _all_rows(xs)
        logits = _logits(hidden, head)
        norm = _normaliser(logits)
        losses = norm - _at(logits, targets) + z_weight * norm**2
        return total + jnp.sum(losses * mask), None

    total, _ = loops.scan(chunk, jnp.zeros((), jnp.float32), (hidden, targets, mask))
    return total / collectives.size(collectives.WORD_ROWS)


def _forward(head, z_weight, hidden, targets, mask):  # noqa: ANN001, ANN202
    """Computes loss and gradient of each chunk: dlogits = softmax - one-hot."""

    def chunk(carry: tuple, xs: tuple) -> tuple[tuple, Array]:
        total, d_head = carry
        hidden, targets, mask = _all_rows(xs)
        logits = _logits(hidden, head)
        norm = _normaliser(logits)
        losses = norm - _at(logits, targets) + z_weight * norm**2
        factor = mask * (1 + 2 * z_weight * norm)
        d_logits = jnp.exp(logits - norm[:, None]) * factor[:, None]
        rows, words, is_here = _rows_and_words(logits, targets)
        d_logits = d_logits.at[rows, words].add(-mask * is_here).astype(hidden.dtype)
        d_hidden = jnp.einsum("tv,dv->td", d_logits, head.astype(hidden.dtype))
        d_hidden = collectives.scatter_sum(d_hidden, collectives.WORD_ROWS, 0)
        d_head += jnp.einsum(
            "td,tv->dv", hidden, d_logits, preferred_element_type=jnp.float32
        )
        return (total + jnp.sum(losses * mask), d_head), d_hidden

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), d_hidden = loops.scan(chunk, zeros, (hidden, targets, mask))
    total = total / collectives.size(collectives.WORD_ROWS)
    return total, (d_head.astype(head.dtype), d_hidden)


def _backward(z_weight, gradient, factor):  # noqa: ANN001, ANN202
    # Each device's part of the sum depends on the vocabulary shards of all.
    factor = collectives.total(factor, collectives.WORDS)
    factor = factor / collectives.size(collectives.WORD_ROWS)
    d_head, d_hidden = (g * factor.astype(g.dtype) for g in gradient)
    return d_head, d_hidden, None, None


_total.defvjp(_forward, _backward)
