"""Terms of the training loss; each is a function of arrays, in float32.

The vocabulary's logits exist for `chunk_tokens` tokens at a time. A sum of
log-likelihoods is a scalar, so its gradient is computed beside it, chunk by chunk, up
to the factor that the backward pass brings (GLM-5 report 2.4: sequence-chunked head).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def next_token_loss(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    *,
    chunk_tokens: int,
    z_weight: float = 0.0,
) -> Float[Array, ""]:
    """Mean over mask of -log softmax(hidden head)[target] + z_weight * logsumexp^2.

    Args:
      hidden: states after the last norm.
      head: output matrix.
      targets: ids of the tokens to predict.
      mask: weight of each position; its sum is the denominator.
      chunk_tokens: tokens whose logits exist at once.
      z_weight: of the squared normaliser (PaLM, arXiv 2204.02311); 0 is off.
    """
    chunks = _chunked(hidden, targets, mask, chunk_tokens)
    total = _total(head, z_weight, *chunks)
    return total / jnp.maximum(jnp.sum(mask), 1)


def token_nll(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    chunk_tokens: int,
) -> Float[Array, "B T"]:
    """-log softmax(hidden head)[target] of every token; not for gradients."""
    mask = jnp.ones(targets.shape, jnp.float32)
    hidden, targets, _ = _chunked(hidden, targets, mask, chunk_tokens)

    def chunk(xs: tuple[Array, Array]) -> Array:
        logits, norm = _logits(xs[0], head)
        return norm - _at(logits, xs[1])

    nll = lax.map(chunk, (hidden, targets))
    return nll.reshape(-1)[: mask.size].reshape(mask.shape)


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    *,
    temperature: float,
    chunk_tokens: int,
) -> Float[Array, "B T"]:
    """Log softmax(hidden head / temperature)[target] of every token, differentiable.

    The backward pass computes each chunk's logits anew.
    """
    mask = jnp.ones(targets.shape, jnp.float32)
    hidden, targets, _ = _chunked(hidden, targets, mask, chunk_tokens)

    @jax.checkpoint
    def chunk(xs: tuple[Array, Array]) -> Array:
        logits, _ = _logits(xs[0], head)
        logits = logits / temperature
        return _at(logits, xs[1]) - jax.nn.logsumexp(logits, axis=-1)

    logprobs = lax.map(chunk, (hidden, targets))
    return logprobs.reshape(-1)[: mask.size].reshape(mask.shape)


def mtp_loss(
    states: Float[Array, "k B T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    chunk_tokens: int,
) -> Float[Array, ""]:
    """Mean over steps of their next-token losses (arXiv 2412.19437, section 2.2).

    Step k at position i predicts targets[i + k]. Positions whose token i + k lies in
    another document, or beyond the row, are left out.

    Args:
      states: of the MTP steps k = 1, 2, ...
      head: output matrix.
      targets: next token of every position.
      mask: weight of each position's target.
      segment_ids: document of each position.
      chunk_tokens: tokens whose logits exist at once.
    """
    num_tokens = targets.shape[1]

    def step(total: Array, xs: tuple[Array, Array]) -> tuple[Array, None]:
        state, k = xs
        is_inside = jnp.arange(num_tokens)[None] < num_tokens - k
        is_same = jnp.roll(segment_ids, -k, axis=1) == segment_ids
        weight = jnp.roll(mask, -k, axis=1) * (is_inside & is_same)
        ahead = jnp.roll(targets, -k, axis=1)
        loss = next_token_loss(state, head, ahead, weight, chunk_tokens=chunk_tokens)
        return total + loss, None

    steps = jnp.arange(1, states.shape[0] + 1)
    total, _ = lax.scan(step, jnp.zeros((), jnp.float32), (states, steps))
    return total / states.shape[0]


def _chunked(hidden: Array, targets: Array, mask: Array, size: int) -> tuple:
    """Flattens tokens and cuts them into chunks [n, size, ...], zero padded."""
    size = min(size, targets.size)
    padding = -targets.size % size

    def cut(x: Array, tail: tuple[int, ...]) -> Array:
        flat = x.reshape(-1, *tail)
        flat = jnp.pad(flat, [(0, padding)] + [(0, 0)] * len(tail))
        return flat.reshape(-1, size, *tail)

    return cut(hidden, hidden.shape[2:]), cut(targets, ()), cut(mask, ())


def _logits(hidden: Array, head: Array) -> tuple[Array, Array]:
    """Float32 logits of a chunk and their log-sum-exp."""
    head = head.astype(hidden.dtype)
    logits = jnp.einsum("td,dv->tv", hidden, head, preferred_element_type=jnp.float32)
    return logits, jax.nn.logsumexp(logits, axis=-1)


def _at(logits: Array, targets: Array) -> Array:
    return jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _total(
    head: Array, z_weight: float, hidden: Array, targets: Array, mask: Array
) -> Array:
    """Sum over all chunks of the weighted losses."""

    def chunk(total: Array, xs: tuple) -> tuple[Array, None]:
        hidden, targets, mask = xs
        logits, norm = _logits(hidden, head)
        losses = norm - _at(logits, targets) + z_weight * norm**2
        return total + jnp.sum(losses * mask), None

    return lax.scan(chunk, jnp.zeros((), jnp.float32), (hidden, targets, mask))[0]


def _forward(head, z_weight, hidden, targets, mask):  # noqa: ANN001, ANN202
    """Loss and gradient of each chunk together: dlogits = softmax - one-hot."""

    def chunk(carry: tuple, xs: tuple) -> tuple[tuple, Array]:
        total, d_head = carry
        hidden, targets, mask = xs
        logits, norm = _logits(hidden, head)
        losses = norm - _at(logits, targets) + z_weight * norm**2
        factor = mask * (1 + 2 * z_weight * norm)
        d_logits = jnp.exp(logits - norm[:, None]) * factor[:, None]
        rows = jnp.arange(targets.size)
        d_logits = d_logits.at[rows, targets].add(-mask).astype(hidden.dtype)
        d_hidden = jnp.einsum("tv,dv->td", d_logits, head.astype(hidden.dtype))
        d_head += jnp.einsum(
            "td,tv->dv", hidden, d_logits, preferred_element_type=jnp.float32
        )
        return (total + jnp.sum(losses * mask), d_head), d_hidden

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32))
    (total, d_head), d_hidden = lax.scan(chunk, zeros, (hidden, targets, mask))
    return total, (d_head.astype(head.dtype), d_hidden)


def _backward(z_weight, gradient, factor):  # noqa: ANN001, ANN202
    d_head, d_hidden = (g * factor.astype(g.dtype) for g in gradient)
    return d_head, d_hidden, None, None


_total.defvjp(_forward, _backward)
