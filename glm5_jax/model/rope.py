"""Rotary position embeddings, interleaved as in GLM's attention and indexer.

GLM rotates the pairs (x0, x1), (x2, x3), ... Permuting the few columns of the weights
is cheaper than permuting activations: with the even columns first, the pairs are
(x_i, x_{i + R/2}), and a rotation works on two contiguous halves. Queries and keys are
permuted alike, so their products do not change.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from pallas_kernels import tiles


def frequencies(config: config_lib.ModelConfig) -> Float[np.ndarray, " r"]:
    """Returns each pair's rotation per token in radians, float32, r = R / 2.

    The frequencies are theta^(-2i/dim). YaRN (arXiv 2309.00071, 3.2) divides the low
    ones by its factor, keeps the high ones, and interpolates between them.
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
    """Returns cos and sin of position * frequency, times a factor, float32."""

    def row(positions: Int[Array, " T"]) -> tuple[Array, Array]:
        angles = positions[:, None].astype(jnp.float32) * frequencies[None]
        return jnp.cos(angles) * factor, jnp.sin(angles) * factor

    # A loop's result is an array: otherwise XLA on CPU recomputes cos at every use.
    return tiles.over_sequences(row, positions)


def halves(weight: Float[Array, "*n R"]) -> Float[Array, "*n R"]:
    """Orders columns as 0, 2, ..., 1, 3, ...: first and second ones of all pairs."""
    return jnp.concatenate([weight[..., ::2], weight[..., 1::2]], axis=-1)


def rotate(x: Float[Array, "*n R"], cos: Array, sin: Array) -> Float[Array, "*n R"]:
    """Rotates the pairs (x_i, x_{i + R/2}); cos and sin broadcast against a half."""
    a, b = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
