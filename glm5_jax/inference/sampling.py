"""Draws the next token: temperature, then top-k, then top-p, then min-p.

The random numbers of a token come from a key that is a function of the run's seed, the
request and the position alone, so what a request gets does not depend on its batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Key

COLDEST = 1e-20  # temperature; with less, logits would be infinite in float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of a batch, as arrays so that new values recompile nothing."""

    temperature: Float[Array, " B"]  # 0 takes the most likely token
    top_p: Float[Array, " B"]  # probability mass to keep, in (0, 1]; 1 is off
    top_k: Int[Array, " B"]  # tokens to keep; 0 is off
    min_p: Float[Array, " B"]  # least share of the largest probability; 0 is off


def make_sampling(
    batch: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Sampling:
    """Returns the same settings for every sequence."""
    return Sampling(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        min_p=jnp.full(batch, min_p, jnp.float32),
    )


@jax.jit  # one call instead of forty
def request_keys(
    seed: int | Int[Array, ""], requests: Int[ArrayLike, " B"]
) -> Key[Array, " B"]:
    """Returns a key for each request, derived from its id."""
    return jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(seed), jnp.asarray(requests)
    )


def sample(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    sampling: Sampling,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws a token for each sequence.

    Args:
      logits: float32.
      keys: of `request_keys`.
      positions: positions of the new tokens in their sequences.
      sampling: settings.

    Returns:
      The ids, and the log-probability of each in the distribution that it was drawn
      from; for a greedy choice in the model's own, at temperature 1.
    """
    return choose(scaled_logits(logits, sampling), keys, positions, sampling)


def choose(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    sampling: Sampling,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws as `sample` does, from the result of `scaled_logits`."""
    is_greedy = sampling.temperature <= 0

    def draw(logits: Array) -> Array:
        token_keys = jax.vmap(jax.random.fold_in)(keys, positions)
        return jax.vmap(jax.random.categorical)(token_keys, logits)

    best = jnp.argmax(logits, axis=1)
    drawn = jax.lax.cond(jnp.all(is_greedy), lambda _: best, draw, logits)
    ids = jnp.where(is_greedy, best, drawn)
    chosen = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
    return ids, chosen - jax.nn.logsumexp(logits, axis=1)


def scaled_logits(
    logits: Float[Array, "B V"], sampling: Sampling
) -> Float[Array, "B V"]:
    """Returns the logits to sample from, -inf for tokens that the filters drop."""
    is_greedy = sampling.temperature <= 0
    temperature = jnp.maximum(sampling.temperature, COLDEST)
    logits = logits / jnp.where(is_greedy, 1.0, temperature)[:, None]
    is_filtered = (sampling.top_p < 1) | (sampling.top_k > 0) | (sampling.min_p > 0)
    return jax.lax.cond(  # skip the sort when no filter is on
        jnp.any(is_filtered & ~is_greedy),
        lambda x: jnp.where(is_greedy[:, None], x, _filtered(x, sampling)),
        lambda x: x,
        logits,
    )


def _filtered(logits: Array, sampling: Sampling) -> Array:
    """Keeps all tokens as likely as the least likely one that passes all filters."""
    top_p, top_k = sampling.top_p[:, None], sampling.top_k[:, None]
    ordered = jnp.sort(logits, axis=1, descending=True)
    is_kept = (jnp.arange(logits.shape[1])[None] < top_k) | (top_k <= 0)
    probs = jax.nn.softmax(jnp.where(is_kept, ordered, -jnp.inf), axis=1)
    before = jnp.cumsum(probs, axis=1) - probs
    is_kept &= (before < top_p) | (top_p >= 1)  # sums may round above 1
    is_kept &= probs >= sampling.min_p[:, None] * probs[:, :1]
    is_kept |= jnp.arange(logits.shape[1])[None] == 0  # a tiny top_p is 0 in float32
    least = jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)
