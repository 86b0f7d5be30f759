"""Accepts a drafted token or draws another; either has the model's distribution.

A round of speculative decoding drafts tokens from a distribution q and then knows the
model's own distribution p at each position. It keeps drafts up to the first position
where the token that is drawn from p differs. There are two ways to draw it.

By the same noise (the default, which needs no code here): every token of the engine is
argmax(log p + g), where the Gumbel noise g is a function of request and position alone
(sampling.py). The draft is argmax(log q + g) with the same g, so that both agree where
p and q are alike: with a probability of at least (1 - d) / (1 + d), where d is the
total variation between p and q (Daliri et al., arXiv 2408.07978). What is drawn does
not depend on the drafts at all: a completion is the same as without them.

By rejection (Leviathan et al., arXiv 2211.17192): the draft x is kept with probability
min(1, p(x) / q(x)); otherwise a token is drawn from max(p - q, 0), normalised. It keeps
1 - d of the drafts, the most that any way can, but the token depends on the draft. The
second distribution is 0 at x, so that a draft is kept exactly if the token equals it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from glm5_jax.inference import sampling as sampling_lib

_KEEPS, _DRAWS_AGAIN = 1, 2  # uses of a position's key besides the draft


class Draft(NamedTuple):
    """A drafted token of each sequence."""

    ids: Int[Array, " B"]  # -1: none; the token is drawn from p
    logits: Float[Array, "B V"]  # of `scaled_logits`, from which it was drawn


def accept_or_redraw(
    logits: Float[Array, "B V"],
    draft: Draft,
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    sampling: sampling_lib.Sampling,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws a token for each sequence by rejection sampling.

    Args:
      logits: of the model, with adjustments, float32.
      draft: to accept, drawn by `sampling.choose` with the same keys and positions.
      keys: as in `sampling.sample`.
      positions: of the tokens.
      sampling: settings; a greedy sequence takes the most likely token.

    Returns:
      The ids, and the log-probability of each in the model's distribution.
    """
    logits = sampling_lib.scaled_logits(logits, sampling)
    is_plain = (draft.ids < 0) | (sampling.temperature <= 0)
    plain, _ = sampling_lib.choose(logits, keys, positions, sampling)
    log_p = jax.nn.log_softmax(logits)
    log_q = jax.nn.log_softmax(draft.logits)
    x = jnp.maximum(draft.ids, 0)[:, None]
    ratio = jnp.exp(_at(log_p, x) - _at(log_q, x))
    here = jax.vmap(jax.random.fold_in)(keys, positions)
    fold_in = jax.vmap(jax.random.fold_in, (0, None))
    is_kept = jax.vmap(jax.random.uniform)(fold_in(here, _KEEPS)) < ratio
    rest = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0)
    # p = q leaves no rest, and then the draft is kept, but for rounding.
    rest = jnp.where(jnp.any(rest > 0, axis=1, keepdims=True), rest, jnp.exp(log_p))
    again = fold_in(here, _DRAWS_AGAIN)
    other = jax.vmap(jax.random.categorical)(again, jnp.log(rest))
    ids = jnp.where(is_plain, plain, jnp.where(is_kept, draft.ids, other))
    return ids, _at(log_p, ids[:, None])


def _at(values: Float[Array, "B V"], ids: Int[Array, "B 1"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(values, ids, axis=1)[:, 0]
