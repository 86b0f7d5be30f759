"""Rotary positions, interleaved as GLM has them in attention and indexer alike.

GLM turns the pairs (x0, x1), (x2, x3), ... It costs less to permute the columns of
the weights, which are few, than activations: with the even columns first, the pairs
are (x_i, x_{i + R/2}) and a turn is two contiguous halves. Queries and keys are
permuted alike, so their products do not change.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import tiles


def tables(
    positions: Int[Array, "B T"], dim: int, theta: float
) -> tuple[Float[Array, "B T r"], Float[Array, "B T r"]]:
    """Cosines and sines of position * theta^(-2i/dim), float32, r = dim / 2."""
    frequencies = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)

    def row(positions: Int[Array, " T"]) -> tuple[Array, Array]:
        angles = positions[:, None].astype(jnp.float32) * frequencies[None]
        return jnp.cos(angles), jnp.sin(angles)

    # What leaves a loop is an array: else XLA on CPU takes cosines at every use.
    return tiles.over_sequences(row, positions)


def halves(weight: Float[Array, "*b R"]) -> Float[Array, "*b R"]:
    """Columns (0, 2, ..., 1, 3, ...): pairs become two halves."""
    return jnp.concatenate([weight[..., ::2], weight[..., 1::2]], axis=-1)


def rotate(x: Float[Array, "*b R"], cos: Array, sin: Array) -> Float[Array, "*b R"]:
    """Turns the pairs (x_i, x_{i + R/2}); cos and sin broadcast against a half."""
    a, b = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
