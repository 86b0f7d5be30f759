"""Triton kernels: a program gathers the rows of one query and attends.

All heads of a query read the same rows of kv. So up to HEADS heads use a gathered row,
which makes the products large enough for Hopper's wgmma. The latent part (C wide) and
the rotated part (R wide) of a row are two tiles, as a tile's sides are powers of two.
"""

import functools
import math
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, dispatch, triton_call
from pallas_kernels.sparse_mla import gpu_backward, gpu_hopper

KEYS_FLOAT32 = 16  # for tests: wider rows do not fit in shared memory
FLOAT32_LATENT = 128
LOG2_E = math.log2(math.e)


def unsupported_sparse_mla(
    q: Array, kv: Array, indices: Array, scale: float, value_dim: int, *_: bool
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    del scale
    latent, rope = value_dim, q.shape[-1] - value_dim
    if latent < 16 or rope < 16 or latent & (latent - 1) or rope & (rope - 1):
        return (
            "value_dim and the rest of q's last axis must be powers of two of 16 or "
            f"more, got {latent} and {rope}."
        )
    halves = jnp.bfloat16, jnp.float16
    if q.dtype not in (*halves, jnp.float32) or kv.dtype not in (q.dtype, jnp.float32):
        return (
            "q must be bfloat16, float16 or float32 and kv the same or float32, got "
            f"{q.dtype} and {kv.dtype}."
        )
    if q.dtype == jnp.float32 and latent > FLOAT32_LATENT:
        return f"float32 fits for a value_dim up to {FLOAT32_LATENT}, got {latent}."
    if kv.shape[1] * kv.shape[2] >= 2**31:
        return f"a sequence's kv must have less than 2**31 elements, got {kv.shape}."
    if indices.dtype != jnp.int32:
        return f"indices must be int32, got {indices.dtype}."
    return None


def sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "B S row"],
    indices: Int[Array, "B T K"],
    scale: float,
    value_dim: int,
    deterministic: bool = False,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.sparse_mla`."""
    out, lse = _attend(q, kv, indices, scale, value_dim, deterministic, interpret)
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _attend(q, kv, indices, scale, value_dim, deterministic, interpret):
    del deterministic
    batch, num_queries, num_heads, width = q.shape
    kv, count = kv.astype(q.dtype), jnp.sum(indices >= 0, axis=-1, dtype=jnp.int32)
    if gpu_hopper.suits(q, value_dim, interpret):
        out, lse_BTN = gpu_hopper.forward(q, kv, indices, count, scale)
        return out, lse_BTN.swapaxes(1, 2)
    tile = block_sizes.gpu().sparse_mla
    heads = gpu_backward.block_heads(num_heads, tile)
    out, lse_BTN = triton_call.call(
        _forward_kernel,
        q,
        kv,
        indices,
        count,
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:3], value_dim), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
        ],
        grid=(batch * num_queries * triton.cdiv(num_heads, heads),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        SCALE=scale * LOG2_E,
        T=num_queries,
        S=kv.shape[1],
        K=indices.shape[2],
        N=num_heads,
        C=value_dim,
        R=width - value_dim,
        HEADS=heads,
        KEYS=KEYS_FLOAT32 if q.dtype == jnp.float32 else tile.sizes[1],
    )
    return out, lse_BTN.swapaxes(1, 2)


def _forward(q, kv, indices, *options):
    out, lse = dispatch.saved(_attend(q, kv, indices, *options))
    return (out, lse), (q, kv, indices, out, lse)


def _backward(scale, value_dim, deterministic, interpret, residuals, cotangents):
    del value_dim
    dq, dkv = gpu_backward.gradients(
        residuals, cotangents, scale, deterministic, interpret
    )
    return dq, dkv, None


_attend.defvjp(_forward, _backward)


@triton.jit
@typing.no_type_check
def _forward_kernel(
    q_ptr, kv_ptr, indices_ptr, count_ptr, out_ptr, lse_ptr,
    SCALE: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    # Softmax in base 2: SCALE holds log2(e). Offsets beyond a sequence are int64.
    blocks: tl.constexpr = (N + HEADS - 1) // HEADS
    row = tl.program_id(0).to(tl.int64) // blocks
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    is_head = (head < N)[:, None]
    c, r = tl.arange(0, C)[None], C + tl.arange(0, R)[None]

    q_ptr += row * (N * (C + R)) + head[:, None] * (C + R)
    kv_ptr += row // T * (S * (C + R))
    indices_ptr += row * K
    q_c = tl.load(q_ptr + c, is_head, 0.0)
    q_r = tl.load(q_ptr + r, is_head, 0.0)
    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, C], tl.float32)

    count = tl.load(count_ptr + row)
    for first in range(0, count, KEYS):
        k = first + tl.arange(0, KEYS)
        key = triton_call.listed(indices_ptr + k, k < count)[:, None]
        kv_c = tl.load(kv_ptr + key * (C + R) + c)
        kv_r = tl.load(kv_ptr + key * (C + R) + r)
        scores = tl.dot(q_c, kv_c.T, input_precision="ieee")
        scores = tl.dot(q_r, kv_r.T, scores, input_precision="ieee")
        scores = tl.where((k < count)[None], scores * SCALE, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(kv_c.dtype)
        out = tl.dot(weights, kv_c, out * shrink[:, None], input_precision="ieee")
        top = new_top

    safe = tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, (top + tl.log2(safe)) * 0.6931471805599453, 0.0)
    tl.store(lse_ptr + row * N + head, lse, head < N)
    out_ptr += row * (N * C) + head[:, None] * C + c
    tl.store(out_ptr, (out / safe[:, None]).to(out_ptr.dtype.element_ty), is_head)
