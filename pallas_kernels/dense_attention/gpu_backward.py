"""Gradients of attention on GPUs, without atomics: a kernel each for dq, dk and dv.

The log-sum-exp restores probabilities. One program sums dk or dv of a block of keys
over the queries that can see it, in order, so that two runs agree bit for bit. One
kernel for both dk and dv would save one of eight products, but two sums of 64 x 256
leave too few registers at 256 dims: ptxas then waits after every single wgmma.
"""

import typing
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels import block_sizes, triton_call

LOG2E = tl.constexpr(1.4426950408889634)


def gradients(
    queries: tuple[jax.Array, jax.Array, jax.Array],
    k: jax.Array,
    v: jax.Array,
    words: jax.Array | None,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dq, dk and dv.

    Args:
      queries: q, d_out [B, T, N, x], and [B, N, P, 4]: lse log2(e), shift, lo and hi,
        with shift = sum(out d_out) - d_lse, and P as in `gpu_words`.
      k: keys.
      v: values.
      words: [B, w, P], or None for all visible keys.
      scale: factor on q . k.
      interpret: see `triton_call.call`.
    """
    q, _, stats = queries
    (batch, num_queries, heads, dim), num_keys = q.shape, k.shape[1]
    rest, is_half = triton_call.split(dim)[1], q.dtype.itemsize == 2
    sizes: dict[str, Any] = {
        "T": num_queries, "S": num_keys, "N": heads, "H": dim, "R": rest,
        "O": v.shape[-1], "WORDS": 0 if words is None else words.shape[1],
        "P": stats.shape[2], "SCALE": scale,
    }  # fmt: skip
    words = stats if words is None else words

    def run(kernel: Any, tile: Any, out: jax.Array, *ins: Any) -> Any:
        rows, cols = tile.sizes if is_half else (32, 32)
        by_queries = kernel is _dq_kernel
        size, step = (num_queries, rows) if by_queries else (num_keys, cols)
        spans = () if by_queries else (_spans(stats, num_keys, rows, cols),)
        return triton_call.call(
            kernel,
            *queries,
            words,
            *spans,
            *ins,
            out_shape=[jax.ShapeDtypeStruct(out.shape, out.dtype)],
            grid=(triton.cdiv(size, step), heads, batch),
            num_warps=tile.warps if is_half else 4,
            num_stages=tile.stages,
            interpret=interpret,
            **sizes,
            **{"BM": rows, "BN": cols},
        )[0]

    tiles = block_sizes.gpu().for_heads(rest)
    keys = k.astype(q.dtype), v.astype(q.dtype)
    dq = run(_dq_kernel, tiles.dense_attention_dq, q, *keys)
    dk = run(_dk_kernel, tiles.dense_attention_dk, k, *keys)
    return dq, dk, run(_dv_kernel, tiles.dense_attention_dv, v, keys[0])


def _spans(stats: jax.Array, num_keys: int, rows: int, cols: int) -> jax.Array:
    """First tile of queries that can see each block of keys, and end: [2, B, S / cols].

    It holds for any lo and hi: tiles within the range that see no key are masked.
    """
    lo, hi = jnp.moveaxis(stats[:, 0, :, 2:], -1, 0).astype(jnp.int32)
    sees = lo < hi
    tiled = lambda x: x.reshape(x.shape[0], -1, rows)
    first = jnp.min(tiled(jnp.where(sees, lo, num_keys)), -1)
    last = jnp.max(tiled(jnp.where(sees, hi, 0)), -1)
    start = jnp.arange(0, num_keys, cols, dtype=jnp.int32)[None, :, None]
    meets = (first[:, None] < start + cols) & (last[:, None] > start)
    tile = jnp.arange(first.shape[1], dtype=jnp.int32)[None, None]
    begin = jnp.min(jnp.where(meets, tile, first.shape[1]), -1)
    return jnp.stack([begin, jnp.max(jnp.where(meets, tile + 1, 0), -1)])


@triton.jit
@typing.no_type_check
def tile_of(
    x, start, SIZE: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, IS_INSIDE: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of one head: [ROWS, DIM], zeros from SIZE on."""
    rows = tl.arange(0, ROWS)
    at = (
        x
        + triton_call.far(start, STEP)
        + rows[:, None] * STEP
        + tl.arange(0, DIM)[None, :]
    )
    if IS_INSIDE or SIZE % ROWS == 0:
        return tl.load(at)
    else:  # Triton omits code after a return on this path
        return tl.load(at, mask=(start + rows < SIZE)[:, None], other=0.0)


@triton.jit
@typing.no_type_check
def tiles_of(
    x, start, SIZE: tl.constexpr, N: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    ROWS: tl.constexpr, IS_INSIDE: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of one head of q or k, as the kernels read them.

    Returns the first H - R dims, a power of two, and the last R; without a rest the
    first tile stands for both, and nobody reads the second.
    """
    tile = tile_of(x, start, SIZE, N * H, H - R, ROWS, IS_INSIDE)
    rest = tile
    if R > 0:
        rest = tile_of(x + (H - R), start, SIZE, N * H, R, ROWS, IS_INSIDE)
    return tile, rest


@triton.jit
@typing.no_type_check
def scores_of(x, x_rest, y, y_rest, R: tl.constexpr):
    """Computes x y^T over both parts of the head's dims."""
    scores = tl.dot(x, tl.trans(y), input_precision="ieee")
    if R > 0:
        scores = tl.dot(x_rest, tl.trans(y_rest), scores, input_precision="ieee")
    return scores


@triton.jit
@typing.no_type_check
def kept(
    words, low, high, cols, start,
    P: tl.constexpr, WORDS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Tells which keys start .. start + BN - 1 count: [BM, BN] or [BN, BM].

    Args:
      words: pointers to the first word of each query.
      low: first visible keys; unused if there are words.
      high: ends of the visible keys.
      cols: 0 .. BN - 1, along the other axis than words, low and high.
      start: first key.
      P: distance between two words of a query.
      WORDS: words per query, 0 without a selection.
      BN: keys, a multiple of 32 with a selection.
    """
    if WORDS > 0:
        words += triton_call.far(start // 32, P)
        word = tl.load(words)
        for i in tl.static_range(1, BN // 32):
            word = tl.where(cols < 32 * i, word, tl.load(words + i * P))
        keep = (word >> (cols % 32).to(tl.uint32)) & 1 != 0
    else:
        keep = (start + cols >= low) & (start + cols < high)
    return keep


@triton.jit
@typing.no_type_check
def _stats(stats, start, BM: tl.constexpr):
    """Loads log-sum-exp log2(e), shift, lo and hi of BM queries as one tile [BM, 4].

    With four separate loads of BM numbers, every thread would repeat those it needs.
    """
    at = stats + (start + tl.arange(0, BM))[:, None] * 4 + tl.arange(0, 4)[None, :]
    lse_low, shift_high = tl.split(tl.reshape(tl.load(at), (BM, 2, 2)))
    lse, low = tl.split(lse_low)
    shift, high = tl.split(shift_high)
    return lse, shift, low.to(tl.int32), high.to(tl.int32)


@triton.jit
@typing.no_type_check
def _dq_kernel(
    q, d_out, stats, words, k, v, dq,
    T: tl.constexpr, P: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, O: tl.constexpr, SCALE: tl.constexpr,
    WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes dq = scale dS K of a head's query tile, dS = P (dO V^T - shift)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    stats += (batch * N + head) * (4 * P)
    lse, shift, low, high = _stats(stats, tile * BM, BM)
    last = tl.max(tl.where(low < high, high, 0))
    begin = tl.min(tl.where(low < high, low, last)) // BN * BN
    q += batch * (T * N * H) + head * H
    d_out += batch * (T * N * O) + head * O
    k += batch * (S * N * H) + head * H
    v += batch * (S * N * O) + head * O
    words += batch * (WORDS * P) + rows[:, None]
    q_tile, q_rest = tiles_of(q, tile * BM, T, N, H, R, BM, False)
    d_out_tile = tile_of(d_out, tile * BM, T, N * O, O, BM, False)
    cols = tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, H - R), tl.float32)
    if R > 0:
        total_rest = tl.zeros((BM, R), tl.float32)
    for start in range(begin, last, BN):
        k_tile, k_rest = tiles_of(k, start, S, N, H, R, BN, False)
        v_tile = tile_of(v, start, S, N * O, O, BN, False)
        scores = scores_of(q_tile, q_rest, k_tile, k_rest, R)
        d_probs = tl.dot(d_out_tile, tl.trans(v_tile), input_precision="ieee")
        keep = kept(words, low[:, None], high[:, None], cols, start, P, WORDS, BN)
        probs = tl.exp2(scores * (SCALE * LOG2E) - lse[:, None])
        d_scores = tl.where(keep, probs * (d_probs - shift[:, None]), 0)
        d_scores = d_scores.to(k_tile.dtype)
        total = tl.dot(d_scores, k_tile, total, input_precision="ieee")
        if R > 0:
            total_rest = tl.dot(d_scores, k_rest, total_rest, input_precision="ieee")
    dq += batch * (T * N * H) + head * H
    _store(dq, total * SCALE, tile * BM, T, N * H, H - R, BM)
    if R > 0:
        _store(dq + (H - R), total_rest * SCALE, tile * BM, T, N * H, R, BM)


@triton.jit
@typing.no_type_check
def _dv_kernel(
    q, d_out, stats, words, spans, k, dv,
    T: tl.constexpr, P: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, O: tl.constexpr, SCALE: tl.constexpr,
    WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes dv = P^T dO of a head's key block; keys are the rows."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0)
    spans += batch * blocks + tl.program_id(0)
    begin, end = tl.load(spans), tl.load(spans + tl.num_programs(2) * blocks)
    start = tl.program_id(0) * BN
    q += batch * (T * N * H) + head * H
    d_out += batch * (T * N * O) + head * O
    words += batch * (WORDS * P)
    stats += (batch * N + head) * (4 * P)
    k = k + batch * (S * N * H) + head * H
    k_tile, k_rest = tiles_of(k, start, S, N, H, R, BN, False)
    total = tl.zeros((BN, O), tl.float32)
    for tile in range(begin, end):
        q_tile, q_rest = tiles_of(q, tile * BM, T, N, H, R, BM, False)
        d_out_tile = tile_of(d_out, tile * BM, T, N * O, O, BM, False)
        lse, _, low, high = _stats(stats, tile * BM, BM)
        scores = scores_of(k_tile, k_rest, q_tile, q_rest, R)
        probs = _probs(
            scores, lse, low, high, words, tile, start, SCALE, P, WORDS, BM, BN
        )
        probs = probs.to(q_tile.dtype)
        total = tl.dot(probs, d_out_tile, total, input_precision="ieee")
    _store(dv + batch * (S * N * O) + head * O, total, start, S, N * O, O, BN)


@triton.jit
@typing.no_type_check
def _dk_kernel(
    q, d_out, stats, words, spans, k, v, dk,
    T: tl.constexpr, P: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, O: tl.constexpr, SCALE: tl.constexpr,
    WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes dk = scale dS^T q of a head's key block; keys are the rows."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    blocks = tl.num_programs(0)
    spans += batch * blocks + tl.program_id(0)
    begin, end = tl.load(spans), tl.load(spans + tl.num_programs(2) * blocks)
    start = tl.program_id(0) * BN
    q += batch * (T * N * H) + head * H
    d_out += batch * (T * N * O) + head * O
    words += batch * (WORDS * P)
    stats += (batch * N + head) * (4 * P)
    k = k + batch * (S * N * H) + head * H
    k_tile, k_rest = tiles_of(k, start, S, N, H, R, BN, False)
    v_tile = tile_of(v + batch * (S * N * O) + head * O, start, S, N * O, O, BN, False)
    total = tl.zeros((BN, H - R), tl.float32)
    if R > 0:
        total_rest = tl.zeros((BN, R), tl.float32)
    for tile in range(begin, end):
        q_tile, q_rest = tiles_of(q, tile * BM, T, N, H, R, BM, False)
        d_out_tile = tile_of(d_out, tile * BM, T, N * O, O, BM, False)
        lse, shift, low, high = _stats(stats, tile * BM, BM)
        scores = scores_of(k_tile, k_rest, q_tile, q_rest, R)
        d_probs = tl.dot(v_tile, tl.trans(d_out_tile), input_precision="ieee")
        probs = _probs(
            scores, lse, low, high, words, tile, start, SCALE, P, WORDS, BM, BN
        )
        d_scores = (probs * (d_probs - shift[None, :])).to(q_tile.dtype)
        total = tl.dot(d_scores, q_tile, total, input_precision="ieee")
        if R > 0:
            total_rest = tl.dot(d_scores, q_rest, total_rest, input_precision="ieee")
    dk += batch * (S * N * H) + head * H
    _store(dk, total * SCALE, start, S, N * H, H - R, BN)
    if R > 0:
        _store(dk + (H - R), total_rest * SCALE, start, S, N * H, R, BN)


@triton.jit
@typing.no_type_check
def _probs(
    scores, lse, low, high, words, tile, start, SCALE: tl.constexpr,
    P: tl.constexpr, WORDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes probabilities [BN, BM], zero for keys that do not count."""
    words += (tile * BM + tl.arange(0, BM))[None, :]
    cols = tl.arange(0, BN)[:, None]
    keep = kept(words, low[None, :], high[None, :], cols, start, P, WORDS, BN)
    return tl.where(keep, tl.exp2(scores * (SCALE * LOG2E) - lse[None, :]), 0)


@triton.jit
@typing.no_type_check
def _store(
    x, tile, start, SIZE: tl.constexpr, STEP: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Writes rows start .. start + ROWS of one head, up to SIZE."""
    rows = tl.arange(0, ROWS)
    at = (
        x
        + triton_call.far(start, STEP)
        + rows[:, None] * STEP
        + tl.arange(0, DIM)[None, :]
    )
    tl.store(at, tile.to(x.dtype.element_ty), mask=(start + rows < SIZE)[:, None])
