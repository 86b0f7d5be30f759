"""Advantages of single rollouts from a critic: GAE over the sampled tokens alone.

Generalized advantage estimation (arXiv 1506.02438), as SAO, GLM-5.2's algorithm for
agents (arXiv 2607.07508), has it: what the environment said is skipped, and lambda
depends on the length. All arrays [B, T] are by target: values[t] is the value of the
tokens up to t, from which the target t was drawn.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def advantages(
    values: Float[Array, "B T"],
    rewards: Float[Array, "B T"],
    lambdas: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    gamma: float,
) -> Float[Array, "B T"]:
    """Returns A_t = d_t + gamma lambda_t A_n, d_t = r_t + gamma V_n - V_t; else 0.

    n is the next sampled token of the same segment. So the last token of an answer is
    compared with the value at the start of the next answer, after everything that the
    environment said in between. After a segment's last sampled token, V_n and A_n are
    0. Values elsewhere have no influence.

    Args:
      values: V.
      rewards: r, of sampled tokens.
      lambdas: lambda, of sampled tokens, in 0..1.
      mask: which targets were sampled.
      segment_ids: episode of each token, contiguous.
      gamma: discount for each sampled token.
    """
    follows = _follows(segment_ids)
    values, rewards = jnp.where(mask, values, 0), jnp.where(mask, rewards, 0)
    nearest = _from_the_end(jnp.where(mask, 0, follows), values)
    next_values = follows * jnp.roll(nearest, -1, axis=1)
    deltas = rewards + gamma * jnp.where(mask, next_values, 0) - values
    factors = jnp.where(mask, gamma * lambdas, 1) * follows
    return jnp.where(mask, _from_the_end(factors, deltas), 0)


def returns(
    rewards: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    gamma: float,
) -> Float[Array, "B T"]:
    """Returns r_t + gamma G_n, the discounted reward from each sampled token on.

    It is what a critic learns with lambda = 1: A_t + V_t, whatever V is.
    """
    zeros, ones = jnp.zeros_like(rewards), jnp.ones_like(rewards)
    return advantages(zeros, rewards, ones, mask, segment_ids, gamma=gamma)


def adaptive_lambda(num_tokens: int, alpha: float) -> float:
    """Returns 1 - 1 / (alpha num_tokens), at least 0 (VAPO, arXiv 2504.05118).

    The weights of d_t add up to alpha num_tokens, so that a reward at the end reaches
    the first tokens of a long answer too.

    Args:
      num_tokens: sampled tokens of the episode.
      alpha: 1.5 in SAO.
    """
    return max(0.0, 1 - 1 / (alpha * max(num_tokens, 1)))


def _follows(segment_ids: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns 1 where the next token is of the same segment, else 0."""
    is_same = segment_ids == jnp.roll(segment_ids, -1, axis=1)
    return is_same.at[:, -1].set(False).astype(jnp.float32)


def _from_the_end(
    factors: Float[Array, "B T"], terms: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns x_t = terms_t + factors_t x_(t + 1), in log T steps."""

    def joined(late: tuple, early: tuple) -> tuple:
        return early[0] * late[0], early[1] + early[0] * late[1]

    return lax.associative_scan(joined, (factors, terms), reverse=True, axis=1)[1]
