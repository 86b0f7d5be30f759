"""The definition: multiplies each row by every matrix, then keeps its group's."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

SCALE_BLOCK = 128  # rows and columns of a matrix that share a scale


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Computes y[m] = x[m] @ w[e] for m in group e; zeros after the last group."""
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(x.shape[0])[:, None]
    is_mine_ME = (rows >= (ends - group_sizes)[None]) & (rows < ends[None])
    y_MEN = jnp.einsum("mk,ekn->men", x, w)
    y = jnp.einsum("men,me->mn", y_MEN, is_mine_ME.astype(y_MEN.dtype))
    return y.astype(x.dtype)


def grouped_matmul_quantized(
    x: Float[Array, "M D"],
    w: Array,
    scales: Float[Array, "E row_blocks column_blocks"],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "M F"]:
    """Computes `grouped_matmul` with dequantized matrices, in float32."""
    matrices = lax.stop_gradient(dequantized(w, scales))
    return grouped_matmul(x.astype(jnp.float32), matrices, group_sizes).astype(x.dtype)


def dequantized(
    w: Array, scales: Float[Array, "*n row_blocks column_blocks"]
) -> Float[Array, "*n D F"]:
    """Returns w[i, j] scales[i // 128, j // 128] of every matrix, in float32."""
    rows = jnp.repeat(scales, SCALE_BLOCK, axis=-2)[..., : w.shape[-2], :]
    each = jnp.repeat(rows, SCALE_BLOCK, axis=-1)[..., : w.shape[-1]]
    return w.astype(jnp.float32) * each
