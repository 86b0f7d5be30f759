"""Rotary positions, interleaved as GLM has them in attention and indexer alike.

GLM turns the pairs (x0, x1), (x2, x3), ... It costs less to permute the columns of
the weights, which are few, than activations: with the even columns first, the pairs
are (x_i, x_{i + R/2}) and a turn is two contiguous halves. Queries and keys are
permuted alike, so their products do not change.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from pallas_kernels import tiles


def frequencies(config: config_lib.ModelConfig) -> Float[np.ndarray, " r"]:
    """Radians a token of each pair, float32, r = qk_rope_head_dim / 2.

    theta^(-2i/dim); YaRN divides those of few turns by its factor (arXiv 2309.00071,
    3.2), and lets a ramp over dims lead from these to the ones that it leaves.
    """
    dim, theta = config.qk_rope_head_dim, config.rope_theta
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    scaling = config.rope_scaling
    if not scaling.is_yarn:
        return plain.astype(np.float32)
    context = scaling.original_max_position_embeddings or config.max_position_embeddings
    ends = [
        dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], dim - 1)
    last += 0.001 * (first == last)
    share = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
    return (plain * (share / scaling.factor + 1 - share)).astype(np.float32)


def tables(
    positions: Int[Array, "B T"],
    frequencies: Float[np.ndarray, " r"],
    factor: float = 1.0,
) -> tuple[Float[Array, "B T r"], Float[Array, "B T r"]]:
    """Cosines and sines of position * frequency, times a factor, float32."""

    def row(positions: Int[Array, " T"]) -> tuple[Array, Array]:
        angles = positions[:, None].astype(jnp.float32) * frequencies[None]
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    # What leaves a loop is an array: else XLA on CPU takes cosines at every use.
    return tiles.over_sequences(row, positions)


def halves(weight: Float[Array, "*n R"]) -> Float[Array, "*n R"]:
    """Columns (0, 2, ..., 1, 3, ...): pairs become two halves."""
    return jnp.concatenate([weight[..., ::2], weight[..., 1::2]], axis=-1)


def rotate(x: Float[Array, "*n R"], cos: Array, sin: Array) -> Float[Array, "*n R"]:
    """Turns the pairs (x_i, x_{i + R/2}); cos and sin broadcast against a half."""
    a, b = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
