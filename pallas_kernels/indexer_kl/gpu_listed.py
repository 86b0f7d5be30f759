"""Triton kernels: the indexer's loss and its gradient, a program per query.

The first kernel writes the head-averaged probabilities of the attention to HBM ([T, K]:
the only array of that size). The second computes the loss and the sums that the
gradient needs, the third the gradient. The last two both compute the indexer's scores,
because this is cheaper than storing them.
"""

import functools
import math
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array

from pallas_kernels import block_sizes, capabilities, dispatch, triton_call
from pallas_kernels.indexer_kl import gradient as gradient_lib

MAX_HEADS = 64  # of the main attention that a program holds at a time
KEYS_FLOAT32 = 16  # gathered per step, for tests
FLOAT32_WIDTH = 192  # of kv: wider rows do not fit in shared memory
LOG2_E = tl.constexpr(math.log2(math.e))


def unsupported_sparse_indexer_kl_loss(
    main: tuple, index: tuple, indices: Array, weight: Array, scale: float
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    del weight, scale
    (q, kv, _), (q_index, k_index, _) = main, index
    dims = (*_split(q.shape[3]), q_index.shape[3])
    if any(dim < 16 or dim & (dim - 1) for dim in dims):
        return (
            "q's last axis must be the sum of two powers of two and q_index's a power "
            f"of two, all 16 or more, got {q.shape[3]} and {q_index.shape[3]}."
        )
    dtypes = {x.dtype.name for x in (q, kv, q_index, k_index)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
        return (
            "q and k, also the indexer's, must all be bfloat16, float16 or float32, "
            f"got {sorted(dtypes)}."
        )
    if q.dtype == jnp.float32 and q.shape[3] > FLOAT32_WIDTH:
        return f"float32 fits for rows of up to {FLOAT32_WIDTH}, got {q.shape[3]}."
    if kv.shape[1] * kv.shape[2] >= 2**31:
        return f"a sequence's kv must have less than 2**31 elements, got {kv.shape}."
    if indices.dtype != jnp.int32:
        return f"indices must be int32, got {indices.dtype}."
    return None


def sparse_indexer_kl_loss(
    main: tuple,
    index: tuple,
    indices: Array,
    weight: Array,
    scale: float,
    *,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.sparse_indexer_kl_loss`.

    Indices are ascending, padded with -1 only at the end. Atomics sum the gradient of
    k_index in float32, so its last bits may change from run to run: each query adds
    to the gradient of the rows it lists, too many terms to store and sort.
    """
    return _loss(index, main, (indices, weight), scale, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(index, main, rows, scale, interpret):
    loss_BT, _ = _compared(index, main, rows, scale, interpret)
    return jnp.sum(loss_BT)


def _forward(index, main, rows, scale, interpret):
    loss_BT, sums = _compared(index, main, rows, scale, interpret)
    gradient = _gradient(index, sums, rows, interpret)
    return dispatch.saved((jnp.sum(loss_BT), gradient))


def _backward(scale, interpret, gradient, factor):
    del scale, interpret
    return gradient_lib.times(factor, gradient), None, None


_loss.defvjp(_forward, _backward)


def _compared(
    index: tuple, main: tuple, rows: tuple, scale: float, interpret: bool
) -> tuple[Array, tuple]:
    """Computes the loss of each query, and the gradient's inputs."""
    (q, kv, lse), (q_index, k_index, w), (indices, weight) = main, index, rows
    num_heads, width = q.shape[2:]
    latent, rope = _split(width)
    count, tiles = _count(indices, weight), block_sizes.gpu()
    exact = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)
    target = triton_call.call(
        _target_kernel,
        q,
        kv,
        lse.swapaxes(1, 2),
        indices,
        count,
        out_shape=[exact(indices)],
        grid=(indices.shape[0] * indices.shape[1],),
        num_warps=tiles.kl_listed_target.warps,
        num_stages=tiles.kl_listed_target.stages,
        interpret=interpret,
        SCALE=scale,
        T=q.shape[1],
        S=kv.shape[1],
        K=indices.shape[2],
        N=num_heads,
        C=latent,
        R=rope,
        HEADS=min(_block(num_heads), MAX_HEADS),
        KEYS=_keys(q, tiles.kl_listed_target),
    )[0]
    loss, norm, total = triton_call.call(
        _loss_kernel,
        q_index,
        k_index,
        w,
        indices,
        count,
        weight,
        target,
        out_shape=[exact(weight)] * 3,
        grid=(indices.shape[0] * indices.shape[1],),
        interpret=interpret,
        **_options(index, indices, tiles.kl_listed_loss),
    )
    return loss, (target, norm, total)


def _gradient(index: tuple, sums: tuple, rows: tuple, interpret: bool) -> tuple:
    """Computes the gradient of the summed loss for q_index, k_index and w."""
    (q_index, k_index, w), (indices, weight) = index, rows
    count = _count(indices, weight)
    dq, dw, dk = triton_call.call(
        _gradient_kernel,
        q_index,
        k_index,
        w,
        indices,
        count,
        weight,
        *sums,
        out_shape=[
            jax.ShapeDtypeStruct(q_index.shape, q_index.dtype),
            jax.ShapeDtypeStruct(w.shape, w.dtype),
            jax.ShapeDtypeStruct(k_index.shape, jnp.float32),
        ],
        grid=(indices.shape[0] * indices.shape[1],),
        zeroed_outputs=(2,),
        interpret=interpret,
        **_options(index, indices, block_sizes.gpu().kl_listed_gradient),
    )
    return dq, dk.astype(k_index.dtype), dw


def _count(indices: Array, weight: Array) -> Array:
    """Counts the listed keys of each query; 0 if its weight is 0."""
    count = jnp.sum(indices >= 0, axis=-1, dtype=jnp.int32)
    return jnp.where(weight == 0, 0, count)


def _options(
    index: tuple, indices: Array, tile: capabilities.Tile
) -> dict[str, typing.Any]:
    """Returns the options of the kernels that compute the indexer's scores."""
    q_index, k_index, _ = index
    _, num_queries, heads, dim = q_index.shape
    return {
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "T": num_queries,
        "S": k_index.shape[1],
        "K": indices.shape[2],
        "I": heads,
        "J": dim,
        "HEADS": _block(heads),
        "KEYS": _keys(q_index, tile),
    }


def _split(width: int) -> tuple[int, int]:
    """Splits a width into the largest power of two below it and the rest."""
    first = 1 << (max(width - 1, 1).bit_length() - 1)
    return first, width - first


def _block(num_heads: int) -> int:
    """Returns the heads of a tile, padding included."""
    return max(triton.next_power_of_2(num_heads), 16)


def _keys(x: Array, tile: capabilities.Tile) -> int:
    return KEYS_FLOAT32 if x.dtype == jnp.float32 else tile.sizes[0]


@triton.jit
@typing.no_type_check
def _target_kernel(
    q_ptr, kv_ptr, lse_ptr, indices_ptr, count_ptr, target_ptr,
    SCALE: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    # Stores the head-averaged probabilities of listed keys; zeros after the list. Each
    # block of heads after the first one gathers the rows again and adds its own.
    row = tl.program_id(0).to(tl.int64)
    c, r = tl.arange(0, C)[None], C + tl.arange(0, R)[None]
    kv_ptr += row // T * (S * (C + R))
    count = tl.load(count_ptr + row)
    for block in tl.static_range(0, N, HEADS):
        head = block + tl.arange(0, HEADS)
        is_head = (head < N)[:, None]
        at = q_ptr + row * (N * (C + R)) + head[:, None] * (C + R)
        q_c = tl.load(at + c, is_head, 0.0)
        q_r = tl.load(at + r, is_head, 0.0)
        # Infinity makes the probabilities of padding heads zero.
        lse = tl.load(lse_ptr + row * N + head, head < N, float("inf"))[:, None]
        lse *= LOG2_E
        for first in range(0, count, KEYS):
            k = first + tl.arange(0, KEYS)
            s = triton_call.listed(indices_ptr + row * K + k, k < count)[:, None]
            key = s * (C + R)
            kv_c = tl.load(kv_ptr + key + c)
            kv_r = tl.load(kv_ptr + key + r)
            # Scales each product by itself, else all warps compute both.
            scores = tl.dot(q_c, kv_c.T, input_precision="ieee") * (SCALE * LOG2_E)
            scores += tl.dot(q_r, kv_r.T, input_precision="ieee") * (SCALE * LOG2_E)
            probs = tl.exp2(scores - lse)
            mean = tl.where(k < count, tl.sum(probs, 0) * (1.0 / N), 0.0)
            if block > 0:
                mean += tl.load(target_ptr + row * K + k, k < count, 0.0)
            tl.store(target_ptr + row * K + k, mean, k < K)
        tl.debug_barrier()  # other threads add to these sums


@triton.jit
@typing.no_type_check
def _loss_kernel(
    q_ptr, k_ptr, w_ptr, indices_ptr, count_ptr, weight_ptr, target_ptr,
    loss_ptr, norm_ptr, total_ptr,
    T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Sum p log p - sum p I + norm sum p, norm = log sum exp I, in one pass.
    row = tl.program_id(0).to(tl.int64)
    q, w, k_ptr = _load_index(q_ptr, k_ptr, w_ptr, row, T, S, I, J, HEADS)
    top = tl.full([KEYS], -1e30, tl.float32)
    weights = tl.zeros([KEYS], tl.float32)
    total = tl.zeros([KEYS], tl.float32)
    loss = tl.zeros([KEYS], tl.float32)
    count = tl.load(count_ptr + row)
    for first in range(0, count, KEYS):
        k = first + tl.arange(0, KEYS)
        key = triton_call.listed(indices_ptr + row * K + k, k < count)[:, None] * J
        rows = tl.load(k_ptr + key + tl.arange(0, J)[None])
        dots = tl.maximum(tl.dot(rows, q.T, input_precision="ieee"), 0.0)
        scores = tl.where(k < count, tl.sum(dots * w[None], 1), -1e30)
        target = tl.load(target_ptr + row * K + k, k < count, 0.0)
        log_target = tl.log(tl.maximum(target, 1e-30))
        loss += tl.where(k < count, target * (log_target - scores), 0.0)
        total += target
        new_top = tl.maximum(top, scores)  # of each place in the tile
        kept = tl.exp(scores - new_top)
        weights = weights * tl.exp(top - new_top) + tl.where(k < count, kept, 0.0)
        top = new_top
    highest = tl.max(top, 0)
    sum_weights = tl.sum(weights * tl.exp(top - highest), 0)
    norm = highest + tl.log(tl.where(sum_weights > 0, sum_weights, 1.0))
    total = tl.sum(total, 0)
    # Without keys, norm is of no use but finite, and total is zero.
    loss = tl.load(weight_ptr + row) * (tl.sum(loss, 0) + norm * total)
    tl.store(loss_ptr + row, loss)
    tl.store(norm_ptr + row, norm)
    tl.store(total_ptr + row, total)


@triton.jit
@typing.no_type_check
def _gradient_kernel(
    q_ptr, k_ptr, w_ptr, indices_ptr, count_ptr, weight_ptr, target_ptr,
    norm_ptr, total_ptr, dq_ptr, dw_ptr, dk_ptr,
    T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # dI = (softmax(I) sum p - p) weight, then through the indexer's scores.
    row = tl.program_id(0).to(tl.int64)
    q, w, k_ptr = _load_index(q_ptr, k_ptr, w_ptr, row, T, S, I, J, HEADS)
    dk_ptr += row // T * (S * J)
    j = tl.arange(0, J)
    weight = tl.load(weight_ptr + row)
    norm, total = tl.load(norm_ptr + row), tl.load(total_ptr + row)
    dq = tl.zeros([J, HEADS], tl.float32)
    dw = tl.zeros([HEADS], tl.float32)
    count = tl.load(count_ptr + row)
    for first in range(0, count, KEYS):
        k = first + tl.arange(0, KEYS)
        key = triton_call.listed(indices_ptr + row * K + k, k < count)[:, None] * J
        rows = tl.load(k_ptr + key + j[None])
        dots = tl.maximum(tl.dot(rows, q.T, input_precision="ieee"), 0.0)
        target = tl.load(target_ptr + row * K + k, k < count, 0.0)
        scores = tl.where(k < count, tl.sum(dots * w[None], 1), -1e30)
        probs = tl.exp(scores - norm)
        d_scores = tl.where(k < count, (probs * total - target) * weight, 0.0)[:, None]
        dw += tl.sum(dots * d_scores, 0)
        d_dots = tl.where(dots > 0, d_scores * w[None], 0.0).to(rows.dtype)
        dq = tl.dot(rows.T, d_dots, dq, input_precision="ieee")
        dk = tl.dot(d_dots, q, input_precision="ieee")
        tl.atomic_add(dk_ptr + key + j[None], dk, (k < count)[:, None], sem="relaxed")
    head = tl.arange(0, HEADS)
    tl.store(dw_ptr + row * I + head, dw.to(dw_ptr.dtype.element_ty), head < I)
    dq_ptr += row * (I * J) + head[None] * J + j[:, None]
    tl.store(dq_ptr, dq.to(dq_ptr.dtype.element_ty), (head < I)[None])


@triton.jit
@typing.no_type_check
def _load_index(
    q_ptr, k_ptr, w_ptr, row,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    # Returns a query's q [HEADS, J], its head weights, and its sequence's keys.
    head = tl.arange(0, HEADS)
    place = row * (I * J) + head[:, None] * J + tl.arange(0, J)[None]
    q = tl.load(q_ptr + place, (head < I)[:, None], 0.0)
    w = tl.load(w_ptr + row * I + head, head < I, 0.0).to(tl.float32)
    return q, w, k_ptr + row // T * (S * J)
