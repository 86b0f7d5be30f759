"""Gradients of attention on Hopper: one kernel for dq, one for dk and dv.

Probabilities come back from the log-sum-exp. dk and dv of a block of keys are summed by
one program over the queries that can see it, in order: without atomics, so that two
runs agree bit by bit, at the price of seven products instead of five.
"""

import typing
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import triton_call

LOG2E = tl.constexpr(1.4426950408889634)


def gradients(
    queries: tuple[jax.Array, ...],
    k: jax.Array,
    v: jax.Array,
    words: jax.Array | None,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv.

    Args:
      queries: q, d_out [B, T, N, x], lse, shift [B, N, T], lo, hi [B, T], with
        shift = sum(out d_out) - d_lse.
      k: keys.
      v: values.
      words: [B, w, T], or None for all visible keys.
      scale: factor on q . k.
      interpret: see `triton_call.call`.
    """
    q, *_, lo, hi = queries
    (batch, num_queries, heads, dim), num_keys = q.shape, k.shape[1]
    is_half = q.dtype.itemsize == 2
    sizes: dict[str, Any] = {
        "T": num_queries, "S": num_keys, "N": heads, "H": dim, "O": v.shape[-1],
        "SCALE": scale, "WORDS": 0 if words is None else words.shape[1],
    }  # fmt: skip
    words = lo if words is None else words
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    rows, cols = (128, 32) if is_half else (32, 32)
    [dq] = triton_call.call(
        _dq_kernel,
        *(*queries, words, k, v),
        out_shape=[like(q)],
        grid=(triton.cdiv(num_queries, rows), heads, batch),
        num_warps=8 if is_half else 4,
        num_stages=3,
        interpret=interpret,
        **sizes,
        **{"BM": rows, "BN": cols},
    )
    rows, cols = (64, 64) if is_half else (32, 32)
    dk, dv = triton_call.call(
        _dkv_kernel,
        *(*queries, words, _spans(lo, hi, num_keys, rows, cols), k, v),
        out_shape=[like(k), like(v)],
        grid=(triton.cdiv(num_keys, cols), heads, batch),
        num_warps=8 if is_half else 4,
        num_stages=2,
        interpret=interpret,
        **sizes,
        **{"BM": rows, "BN": cols},
    )
    return dq, dk, dv


def _spans(
    lo: jax.Array, hi: jax.Array, num_keys: int, rows: int, cols: int
) -> jax.Array:
    """First tile of queries that can see each block of keys, and end: [2, B, S / cols].

    Holds for any lo and hi; tiles between that see nothing of the block are masked.
    """
    sees = lo < hi
    tiled = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % rows))).reshape(
        x.shape[0], -1, rows
    )
    first = jnp.min(tiled(jnp.where(sees, lo, num_keys) - num_keys), -1) + num_keys
    last = jnp.max(tiled(jnp.where(sees, hi, 0)), -1)
    start = jnp.arange(0, num_keys, cols, dtype=jnp.int32)[None, :, None]
    meets = (first[:, None] < start + cols) & (last[:, None] > start)
    tile = jnp.arange(first.shape[1], dtype=jnp.int32)[None, None]
    begin = jnp.min(jnp.where(meets, tile, first.shape[1]), -1)
    return jnp.stack([begin, jnp.max(jnp.where(meets, tile + 1, 0), -1)])


@triton.jit
@typing.no_type_check
def tile_of(  # noqa: ANN201
    x, start, SIZE: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,  # noqa: ANN001
    ROWS: tl.constexpr, IS_INSIDE: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of one head: [ROWS, DIM], zeros from SIZE on."""
    rows, wide = tl.arange(0, ROWS), tl.full((), STEP, tl.int64)
    at = x + start * wide + rows[:, None] * STEP + tl.arange(0, DIM)[None, :]
    if IS_INSIDE or SIZE % ROWS == 0:
        return tl.load(at)
    else:  # Triton compiles no code after a return that it takes
        return tl.load(at, mask=(start + rows < SIZE)[:, None], other=0.0)


@triton.jit
@typing.no_type_check
def kept(  # noqa: ANN201
    words, low, high, rows, cols, start,  # noqa: ANN001
    T: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Whether key start + cols counts for each of the rows; both have two axes."""
    if WORDS > 0:
        at = words + start // 32 * T + rows
        word = tl.load(at, mask=rows < T, other=0)
        if BN == 64:
            word = tl.where(cols < 32, word, tl.load(at + T, mask=rows < T, other=0))
        keep = (word >> (cols % 32).to(tl.uint32)) & 1 != 0
    else:
        keep = (start + cols >= low) & (start + cols < high)
    return keep


@triton.jit
@typing.no_type_check
def _dq_kernel(  # noqa: ANN202, PLR0913
    q, d_out, lse, shift, lo, hi, words, k, v, dq,  # noqa: ANN001
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    O: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of queries of a head: dS = P (dO V^T - shift), dq = scale dS K."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    is_row = rows < T
    low = tl.load(lo + batch * T + rows, mask=is_row, other=0)
    high = tl.load(hi + batch * T + rows, mask=is_row, other=0)
    last = tl.max(tl.where(low < high, high, 0))
    begin = tl.min(tl.where(low < high, low, last)) // BN * BN
    flat = (batch * N + head) * T + rows
    lse_tile = tl.load(lse + flat, mask=is_row, other=0.0) * LOG2E
    shift_tile = tl.load(shift + flat, mask=is_row, other=0.0)
    q_tile = tile_of(
        q + batch * (T * N * H) + head * H, tile * BM, T, N * H, H, BM, False
    )
    d_out_tile = tile_of(
        d_out + batch * (T * N * O) + head * O, tile * BM, T, N * O, O, BM, False
    )
    k += batch * (S * N * H) + head * H
    v += batch * (S * N * O) + head * O
    words += batch * (WORDS * T)
    cols = tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, H), tl.float32)
    for start in range(begin, last, BN):
        k_tile = tile_of(k, start, S, N * H, H, BN, False)
        v_tile = tile_of(v, start, S, N * O, O, BN, False)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        d_probs = tl.dot(d_out_tile, tl.trans(v_tile), input_precision="ieee")
        keep = kept(
            words, low[:, None], high[:, None], rows[:, None], cols, start, T, WORDS, BN
        )
        probs = tl.exp2(scores * (SCALE * LOG2E) - lse_tile[:, None])
        d_scores = tl.where(keep, probs * (d_probs - shift_tile[:, None]), 0)
        total = tl.dot(d_scores.to(k_tile.dtype), k_tile, total, input_precision="ieee")
    at = dq + (batch * T + tile * BM) * (N * H) + head * H
    at += tl.arange(0, BM)[:, None] * (N * H) + tl.arange(0, H)[None, :]
    tl.store(at, (total * SCALE).to(dq.dtype.element_ty), mask=is_row[:, None])


@triton.jit
@typing.no_type_check
def _dkv_kernel(  # noqa: ANN202, PLR0913
    q, d_out, lse, shift, lo, hi, words, spans, k, v, dk, dv,  # noqa: ANN001
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    O: tl.constexpr, SCALE: tl.constexpr, WORDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of keys of a head: dv = P^T dO, dk = scale dS^T q; keys run down."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0)
    span = spans + batch * blocks + tl.program_id(0)
    begin, end = tl.load(span), tl.load(span + tl.num_programs(2) * blocks)
    start = tl.program_id(0) * BN
    k_tile = tile_of(k + batch * (S * N * H) + head * H, start, S, N * H, H, BN, False)
    v_tile = tile_of(v + batch * (S * N * O) + head * O, start, S, N * O, O, BN, False)
    q += batch * (T * N * H) + head * H
    d_out += batch * (T * N * O) + head * O
    lo += batch * T
    hi += batch * T
    lse += (batch * N + head) * T
    shift += (batch * N + head) * T
    words += batch * (WORDS * T)
    cols = tl.arange(0, BN)[None, :]
    dk_total = tl.zeros((BN, H), tl.float32)
    dv_total = tl.zeros((BN, O), tl.float32)
    for tile in range(begin, end):
        rows = (tile * BM + tl.arange(0, BM))[:, None]
        is_row = rows < T
        q_tile = tile_of(q, tile * BM, T, N * H, H, BM, False)
        d_out_tile = tile_of(d_out, tile * BM, T, N * O, O, BM, False)
        low = tl.load(lo + rows, mask=is_row, other=0)
        high = tl.load(hi + rows, mask=is_row, other=0)
        lse_tile = tl.load(lse + rows, mask=is_row, other=0.0) * LOG2E
        shift_tile = tl.load(shift + rows, mask=is_row, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        keep = kept(words, low, high, rows, cols, start, T, WORDS, BN)
        probs = tl.where(keep, tl.exp2(scores * (SCALE * LOG2E) - lse_tile), 0)
        probs_half = tl.trans(probs.to(q_tile.dtype))
        dv_total = tl.dot(probs_half, d_out_tile, dv_total, input_precision="ieee")
        d_probs = tl.dot(d_out_tile, tl.trans(v_tile), input_precision="ieee")
        d_scores = tl.trans((probs * (d_probs - shift_tile)).to(q_tile.dtype))
        dk_total = tl.dot(d_scores, q_tile, dk_total, input_precision="ieee")
    keys = tl.arange(0, BN)[:, None]
    is_key = start + keys < S
    at = dk + (batch * S + start) * (N * H) + head * H
    at += keys * (N * H) + tl.arange(0, H)[None, :]
    tl.store(at, (dk_total * SCALE).to(dk.dtype.element_ty), mask=is_key)
    at = dv + (batch * S + start) * (N * O) + head * O
    at += keys * (N * O) + tl.arange(0, O)[None, :]
    tl.store(at, dv_total.to(dv.dtype.element_ty), mask=is_key)
