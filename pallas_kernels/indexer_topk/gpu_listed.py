"""Triton kernels: scores of a query's listed keys, and their gradient.

A program takes a query and gathers its keys, a block at a time. Atomics sum the keys'
gradient in float32.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, capabilities, triton_call

KEYS_FLOAT32 = 32  # gathered per step, for tests


def unsupported_indexer_scores_at(
    q: Array, k: Array, w: Array, indices: Array
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    heads, dim = q.shape[-2:]
    if any(n & (n - 1) or n < 16 for n in (max(heads, 16), dim)) or heads > 128:
        return (
            "heads must be a power of two up to 128 and their dim one of 16 or more, "
            f"got {heads} and {dim}."
        )
    if q.dtype != k.dtype or q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"q and k must share a float dtype, got {q.dtype} and {k.dtype}."
    if indices.dtype != jnp.int32:
        return f"indices must be int32, got {indices.dtype}."
    del w
    return None


def indexer_scores_at(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    indices: Int[Array, "B T K"],
    *,
    interpret: bool = False,
) -> Float[Array, "B T K"]:
    """See `pallas_kernels.indexer_scores_at`."""
    return _scores(q, k, w, indices, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scores(q, k, w, indices, interpret):
    return triton_call.call(
        _forward_kernel,
        q,
        k,
        w,
        indices,
        out_shape=[jax.ShapeDtypeStruct(indices.shape, jnp.float32)],
        **_options(q, k, indices, block_sizes.gpu().scores_at, interpret),
    )[0]


def _forward(q, k, w, indices, interpret):
    return _scores(q, k, w, indices, interpret), (q, k, w, indices)


def _backward(interpret, residuals, d_scores):
    q, k, w, indices = residuals
    dq, dw, dk = triton_call.call(
        _backward_kernel,
        q,
        k,
        w,
        indices,
        d_scores,
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct(w.shape, w.dtype),
            jax.ShapeDtypeStruct(k.shape, jnp.float32),
        ],
        zeroed_outputs=(2,),
        **_options(q, k, indices, block_sizes.gpu().scores_at_gradient, interpret),
    )
    return dq, dk.astype(k.dtype), dw, None


_scores.defvjp(_forward, _backward)


def _options(
    q: Array, k: Array, indices: Array, tile: capabilities.Tile, interpret: bool
) -> dict:
    """Returns the options of a kernel."""
    batch, num_queries, heads, dim = q.shape
    return {
        "grid": (batch * num_queries,),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "interpret": interpret,
        "T": num_queries,
        "S": k.shape[1],
        "K": indices.shape[2],
        "I": heads,
        "J": dim,
        "HEADS": max(heads, 16),
        "KEYS": KEYS_FLOAT32 if q.dtype == jnp.float32 else tile.sizes[0],
    }


@triton.jit
@typing.no_type_check
def _forward_kernel(
    q_ptr, k_ptr, w_ptr, indices_ptr, scores_ptr,
    T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, HEADS), tl.arange(0, J)
    q = tl.load(q_ptr + row * (I * J) + i[:, None] * J + j[None], (i < I)[:, None], 0.0)
    w = tl.load(w_ptr + row * I + i, i < I, 0.0).to(tl.float32)
    k_ptr += row // T * S * J
    for first in range(0, K, KEYS):
        place = first + tl.arange(0, KEYS)
        key = tl.load(indices_ptr + row * K + place, place < K, -1)
        at = tl.maximum(key, 0).to(tl.int64)[:, None] * J
        k = tl.load(k_ptr + at + j[None])
        products = tl.dot(k, q.T, input_precision="ieee")
        scores = tl.sum(tl.maximum(products, 0.0) * w[None], 1)
        scores = tl.where(key < 0, 0.0, scores)
        tl.store(scores_ptr + row * K + place, scores, place < K)


@triton.jit
@typing.no_type_check
def _backward_kernel(
    q_ptr, k_ptr, w_ptr, indices_ptr, d_scores_ptr, dq_ptr, dw_ptr, dk_ptr,
    T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, HEADS), tl.arange(0, J)
    is_head = (i < I)[:, None]
    at_q = row * (I * J) + i[:, None] * J + j[None]
    q = tl.load(q_ptr + at_q, is_head, 0.0)
    w = tl.load(w_ptr + row * I + i, i < I, 0.0).to(tl.float32)
    at_sequence = row // T * S * J
    dq_T = tl.zeros([J, HEADS], tl.float32)  # a product's longer side goes first
    dw = tl.zeros([HEADS], tl.float32)
    for first in range(0, K, KEYS):
        place = first + tl.arange(0, KEYS)
        key = tl.load(indices_ptr + row * K + place, place < K, -1)
        d_scores = tl.load(d_scores_ptr + row * K + place, key >= 0, 0.0)
        at = at_sequence + tl.maximum(key, 0).to(tl.int64)[:, None] * J + j[None]
        k = tl.load(k_ptr + at)
        products = tl.dot(k, q.T, input_precision="ieee")
        dw += tl.sum(tl.maximum(products, 0.0) * d_scores[:, None], 0)
        d_products = tl.where(products > 0.0, d_scores[:, None] * w[None], 0.0)
        d_products = d_products.to(k.dtype)
        dq_T = tl.dot(k.T, d_products, dq_T, input_precision="ieee")
        dk = tl.dot(d_products, q, input_precision="ieee")
        is_key = (key >= 0)[:, None]
        tl.atomic_add(dk_ptr + at, dk, is_key, sem="relaxed")
    tl.store(dq_ptr + at_q, dq_T.T.to(dq_ptr.dtype.element_ty), is_head)
    tl.store(dw_ptr + row * I + i, dw, i < I)
