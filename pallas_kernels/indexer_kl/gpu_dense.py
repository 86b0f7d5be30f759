"""Triton kernels for Hopper of the loss over all visible keys, or those of bits.

A chunk of queries at a time: the attention's probabilities, averaged over heads, take
four fifths of the work and are computed once, into HBM ([chunk, S]; -1 where a key does
not count). Then the loss and its gradient, with q's rows as queries times heads of the
indexer; k's gradient by tiles of keys, in order, without atomics.
"""

import functools
import math
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jaxtyping import Array

from pallas_kernels import dispatch, selection, triton_call
from pallas_kernels.indexer_kl import gradient as gradient_lib

ROWS = 128  # queries times heads of the indexer, of a tile
QUERIES = 128  # of a tile of probabilities
KEYS = 64  # of a tile
# Queries of a pass: of the indexer's 32 heads, 384 tiles, which an H200 runs at once.
CHUNK = 1536
LOG2_E = tl.constexpr(math.log2(math.e))


def unsupported_indexer_kl_loss(
    main: tuple, index: tuple, *_: typing.Any
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    (q, k, _), (q_index, k_index, _) = main, index
    heads, dim = q_index.shape[2:]
    sizes = (q.shape[3], dim)
    if any(x < 16 or x & (x - 1) for x in sizes):
        return f"last axes must be powers of two of 16 or more, got {sizes}."
    if heads > ROWS or heads & (heads - 1):
        return f"the indexer's heads must be a power of two up to {ROWS}, got {heads}."
    dtypes = {x.dtype.name for x in (q, k, q_index, k_index)}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
        return (
            "q and k, also the indexer's, must all be bfloat16, float16 or float32, "
            f"got {sorted(dtypes)}."
        )
    if k_index.shape[1] * CHUNK >= 2**31:
        return f"there may be up to {2**31 // CHUNK} keys, got {k_index.shape[1]}."
    if q.dtype == jnp.float32 and q.shape[3] > 128:
        return f"float32 fits for heads of up to 128, got {q.shape[3]}."
    return None


def indexer_kl_loss(
    main: tuple,
    index: tuple,
    lo: Array,
    hi: Array,
    selected: Array | None,
    weight: Array,
    scale: float,
    *,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.indexer_kl_loss`."""
    if selected is not None and selected.dtype == bool:
        selected = selection.pack(selected)
    hi = jnp.where(weight == 0, 0, hi)
    return _loss(index, main, (lo, hi, selected, weight), scale, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(index, main, rows, scale, interpret):
    return _over_chunks(index, main, rows, scale, interpret, with_gradient=False)[0]


def _forward(index, main, rows, scale, interpret):
    result = _over_chunks(index, main, rows, scale, interpret, with_gradient=True)
    return dispatch.saved(result)


def _backward(scale, interpret, gradient, factor):
    del scale, interpret
    return gradient_lib.times(factor, gradient), None, None


_loss.defvjp(_forward, _backward)


def _over_chunks(
    index: tuple,
    main: tuple,
    rows: tuple,
    scale: float,
    interpret: bool,
    with_gradient: bool,
) -> tuple[Array, tuple]:
    """The loss and, if wanted, its gradient for q, k and w."""
    q_index, k_index, w = index
    batch, num_queries = q_index.shape[:2]
    chunk = min(CHUNK, triton.cdiv(num_queries, QUERIES) * QUERIES)
    num_chunks = triton.cdiv(num_queries, chunk)

    def add(dk: Array | None, start: Array) -> tuple[Array | None, tuple]:
        loss, sums = _compared(index, main, rows, start, scale, chunk, interpret)
        if dk is None:
            return None, (loss,)
        dq, dw, new = _gradient(index, rows, start, sums, interpret)
        return dk + new, (loss, dq, dw)

    def sequence(b: Array) -> tuple[Array | None, tuple]:
        firsts = jnp.arange(num_chunks, dtype=jnp.int32) * chunk
        starts = jnp.stack([jnp.broadcast_to(b, firsts.shape), firsts], axis=-1)
        shape = k_index.shape[1:]
        dk = jnp.zeros(shape, jnp.float32) if with_gradient else None
        dk, outs = lax.scan(add, dk, starts)
        join = lambda x: x.reshape(-1, *x.shape[2:])[:num_queries]
        return dk, jax.tree.map(join, outs)

    dk, outs = lax.map(sequence, jnp.arange(batch, dtype=jnp.int32))
    loss = jnp.sum(outs[0])
    if dk is None:
        return loss, ()
    gradient = (outs[1], dk.astype(k_index.dtype), outs[2].astype(w.dtype))
    return loss, gradient


def _compared(
    index: tuple,
    main: tuple,
    rows: tuple,
    start: Array,
    scale: float,
    chunk: int,
    interpret: bool,
) -> tuple[Array, tuple]:
    """Loss of a chunk's queries, and what their gradient needs of the attention."""
    (q, k, lse), (lo, hi, bits, weight) = main, rows
    sizes = _sizes(index)
    _, num_queries, num_heads, head_dim = q.shape
    given = jnp.zeros((1, 1, 1), jnp.uint32) if bits is None else bits
    target = triton_call.call(
        _target_kernel,
        q,
        k,
        lse,
        lo,
        hi,
        given,
        start,
        out_shape=[jax.ShapeDtypeStruct((chunk, sizes["STRIDE"]), jnp.float32)],
        grid=(chunk // QUERIES, sizes["STRIDE"] // KEYS),
        num_warps=8,
        num_stages=2,
        interpret=interpret,
        SCALE=scale,
        T=num_queries,
        S=k.shape[1],
        N=num_heads,
        H=head_dim,
        WORDS=0 if bits is None else bits.shape[2],
        STRIDE=sizes["STRIDE"],
        QUERIES=QUERIES,
        KEYS=KEYS,
    )[0]
    loss, norm, total = triton_call.call(
        _loss_kernel,
        *index,
        lo,
        hi,
        weight,
        start,
        target,
        out_shape=[jax.ShapeDtypeStruct((chunk,), jnp.float32)] * 3,
        grid=(chunk // sizes["QUERIES"],),
        num_warps=8,
        num_stages=2,
        interpret=interpret,
        **sizes,
    )
    return loss, (target, norm, total)


def _gradient(
    index: tuple, rows: tuple, start: Array, sums: tuple, interpret: bool
) -> tuple[Array, Array, Array]:
    """Gradients of a chunk for its q and w, and for all k."""
    (q_index, k_index, _), (lo, hi, _, weight) = index, rows
    sizes, chunk = _sizes(index), sums[0].shape[0]
    heads, dim = q_index.shape[2:]
    launch = functools.partial(
        triton_call.call, num_warps=8, interpret=interpret, **sizes
    )
    dq, dw, d_scores = launch(
        _gradient_kernel,
        *index,
        lo,
        hi,
        weight,
        start,
        *sums,
        out_shape=[
            jax.ShapeDtypeStruct((chunk, heads, dim), q_index.dtype),
            jax.ShapeDtypeStruct((chunk, heads), jnp.float32),
            jax.ShapeDtypeStruct(sums[0].shape, jnp.float32),
        ],
        grid=(chunk // sizes["QUERIES"],),
        num_stages=1,  # pipelined, ptxas serialises its products (C7515)
    )
    (dk,) = launch(
        _dk_kernel,
        *index,
        lo,
        hi,
        start,
        d_scores,
        *_groups(lo, hi, start, chunk, sizes),
        out_shape=[jax.ShapeDtypeStruct(k_index.shape[1:], jnp.float32)],
        grid=(sizes["STRIDE"] // KEYS,),
        num_stages=2,
    )
    return dq, dw, dk


def _groups(
    lo: Array, hi: Array, start: Array, chunk: int, sizes: dict
) -> tuple[Array, Array]:
    """First and end of the tiles of a chunk's queries that see each tile of keys."""
    sequence, first = start
    t = first + jnp.arange(chunk)
    is_row = t < lo.shape[1]
    t = jnp.minimum(t, lo.shape[1] - 1)
    lo, hi = lo[sequence, t], hi[sequence, t]
    is_row &= lo < hi
    low = jnp.where(is_row, lo, sizes["STRIDE"]).reshape(-1, sizes["QUERIES"])
    high = jnp.where(is_row, hi, 0).reshape(-1, sizes["QUERIES"])
    key = jnp.arange(0, sizes["STRIDE"], KEYS)[:, None]
    sees = (jnp.min(low, 1)[None] < key + KEYS) & (jnp.max(high, 1)[None] > key)
    group = jnp.arange(low.shape[0], dtype=jnp.int32)[None]
    end = jnp.max(jnp.where(sees, group + 1, 0), axis=1)
    return jnp.min(jnp.where(sees, group, end[:, None]), axis=1), end


def _sizes(index: tuple) -> dict[str, typing.Any]:
    q_index, k_index, _ = index
    _, num_queries, heads, dim = q_index.shape
    return {
        "T": num_queries,
        "S": k_index.shape[1],
        "I": heads,
        "J": dim,
        "STRIDE": triton.cdiv(k_index.shape[1], KEYS) * KEYS,
        "QUERIES": ROWS // heads,
        "KEYS": KEYS,
    }


@triton.jit
@typing.no_type_check
def _target_kernel(
    q_ptr, k_ptr, lse_ptr, lo_ptr, hi_ptr, bits_ptr, start_ptr, target_ptr,
    SCALE: tl.constexpr, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, WORDS: tl.constexpr, STRIDE: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    # Probabilities [QUERIES, KEYS], mean of the heads; -1 where a key does not count.
    sequence = tl.load(start_ptr).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    s = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    t = tl.load(start_ptr + 1) + i
    lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)
    hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)
    first, end = _span(lo, hi)
    if (first < tl.program_id(1) * KEYS + KEYS) & (end > tl.program_id(1) * KEYS):
        h = tl.arange(0, H)[None]
        q_row = q_ptr + (sequence * T + t)[:, None] * (N * H) + h
        k_row = k_ptr + (sequence * S + s)[:, None] * (N * H) + h
        total = tl.zeros([QUERIES, KEYS], tl.float32)
        for n in range(N):
            q = tl.load(q_row + n * H, (t < T)[:, None], 0.0)
            k = tl.load(k_row + n * H, (s < S)[:, None], 0.0)
            lse = tl.load(lse_ptr + (sequence * N + n) * T + t, t < T, 0.0)
            scores = tl.dot(q, k.T, input_precision="ieee")
            total += tl.exp2(scores * (SCALE * LOG2_E) - lse[:, None] * LOG2_E)
        keep = (s[None] >= lo[:, None]) & (s[None] < hi[:, None])
        if WORDS > 0:
            # 128 keys have 128 words: a tile lies in one run, at one place in them.
            word = s // 4096 * 128 + s % 128
            place = (sequence * T + t)[:, None] * WORDS + word[None]
            bits = tl.load(bits_ptr + place, keep, 0)
            keep = keep & (((bits >> (s % 4096 // 128)[None].to(tl.uint32)) & 1) == 1)
        mean = tl.where(keep, total * (1.0 / N), -1.0)
        tl.store(target_ptr + i[:, None] * STRIDE + s[None], mean)


@triton.jit
@typing.no_type_check
def _loss_kernel(
    q_ptr, k_ptr, w_ptr, lo_ptr, hi_ptr, weight_ptr, start_ptr, target_ptr,
    loss_ptr, norm_ptr, total_ptr,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    STRIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Sum p log p - sum p I + norm sum p, norm = log sum exp I, in one pass.
    sequence = tl.load(start_ptr).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    t = tl.load(start_ptr + 1) + i
    lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)
    hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)
    first, end = _span(lo, hi)
    q, w = _load_rows(q_ptr, w_ptr, start_ptr, tl.program_id(0), T, I, J, QUERIES)
    k_ptr += sequence * (S * J)
    top = tl.full([QUERIES, KEYS], -1e30, tl.float32)
    weights = tl.zeros([QUERIES, KEYS], tl.float32)
    total = tl.zeros([QUERIES, KEYS], tl.float32)
    loss = tl.zeros([QUERIES, KEYS], tl.float32)
    for start in range(first // KEYS * KEYS, end, KEYS):
        s = start + tl.arange(0, KEYS)
        k = tl.load(
            k_ptr + s[:, None] * J + tl.arange(0, J)[None], (s < S)[:, None], 0.0
        )
        _, scores = _scores(q, k, w, I, QUERIES, KEYS)
        target = tl.load(target_ptr + i[:, None] * STRIDE + s[None])
        keep = target >= 0
        target = tl.where(keep, target, 0.0)
        scores = tl.where(keep, scores, -1e30)
        log_target = tl.log(tl.maximum(target, 1e-30))
        loss += tl.where(keep, target * (log_target - scores), 0.0)
        total += target
        new_top = tl.maximum(top, scores)  # of each place in the tile
        weights *= tl.exp(top - new_top)
        weights += tl.where(keep, tl.exp(scores - new_top), 0.0)
        top = new_top
    highest = tl.max(top, 1)
    sum_weights = tl.sum(weights * tl.exp(top - highest[:, None]), 1)
    norm = highest + tl.log(tl.where(sum_weights > 0, sum_weights, 1.0))
    total = tl.sum(total, 1)
    # Without keys, norm is of no use but finite, and total is zero.
    loss = tl.sum(loss, 1) + norm * total
    weight = tl.load(weight_ptr + sequence * T + t, t < T, 0.0)
    tl.store(loss_ptr + i, weight * loss)
    tl.store(norm_ptr + i, norm)
    tl.store(total_ptr + i, total)


@triton.jit
@typing.no_type_check
def _gradient_kernel(
    q_ptr, k_ptr, w_ptr, lo_ptr, hi_ptr, weight_ptr, start_ptr, target_ptr,
    norm_ptr, total_ptr, dq_ptr, dw_ptr, d_scores_ptr,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    STRIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # dI = (softmax(I) sum p - p) weight to HBM, and from it dq and dw.
    sequence = tl.load(start_ptr).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    t = tl.load(start_ptr + 1) + i
    lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)
    hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)
    first, end = _span(lo, hi)
    q, w = _load_rows(q_ptr, w_ptr, start_ptr, tl.program_id(0), T, I, J, QUERIES)
    k_ptr += sequence * (S * J)
    j = tl.arange(0, J)[None]
    weight = tl.load(weight_ptr + sequence * T + t, t < T, 0.0)[:, None]
    norm, total = tl.load(norm_ptr + i)[:, None], tl.load(total_ptr + i)[:, None]
    dq = tl.zeros([QUERIES * I, J], tl.float32)
    dw = tl.zeros([QUERIES * I], tl.float32)
    for start in range(first // KEYS * KEYS, end, KEYS):
        s = start + tl.arange(0, KEYS)
        k = tl.load(k_ptr + s[:, None] * J + j, (s < S)[:, None], 0.0)
        dots, scores = _scores(q, k, w, I, QUERIES, KEYS)
        place = i[:, None] * STRIDE + s[None]
        target = tl.load(target_ptr + place)
        scores = tl.where(target >= 0, scores, -1e30)
        d_scores = (tl.exp(scores - norm) * total - target) * weight
        d_scores = tl.where(target >= 0, d_scores, 0.0)
        tl.store(d_scores_ptr + place, d_scores)
        d_rows = _repeat(d_scores, I, QUERIES, KEYS)
        dw += tl.sum(dots * d_rows, 1)
        d_dots = tl.where(dots > 0, d_rows * w[:, None], 0.0).to(k.dtype)
        dq = tl.dot(d_dots, k, dq, input_precision="ieee")
    row = tl.program_id(0) * (QUERIES * I) + tl.arange(0, QUERIES * I)
    tl.store(dw_ptr + row, dw)
    tl.store(dq_ptr + row[:, None] * J + j, dq.to(dq_ptr.dtype.element_ty))


@triton.jit
@typing.no_type_check
def _dk_kernel(
    q_ptr, k_ptr, w_ptr, lo_ptr, hi_ptr, start_ptr, d_scores_ptr, first_ptr, end_ptr,
    dk_ptr,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    STRIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # What a chunk's queries give to a tile of keys, in their order.
    sequence = tl.load(start_ptr).to(tl.int64)
    s = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    place = s[:, None] * J + tl.arange(0, J)[None]
    k = tl.load(k_ptr + sequence * (S * J) + place, (s < S)[:, None], 0.0)
    first = tl.load(first_ptr + tl.program_id(0))
    end = tl.load(end_ptr + tl.program_id(0))
    dk = tl.zeros([KEYS, J], tl.float32)
    for group in range(first, end):
        i = group * QUERIES + tl.arange(0, QUERIES)
        t = tl.load(start_ptr + 1) + i
        lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)[:, None]
        hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)[:, None]
        q, w = _load_rows(q_ptr, w_ptr, start_ptr, group, T, I, J, QUERIES)
        keep = (s[None] >= lo) & (s[None] < hi)
        d_scores = tl.load(d_scores_ptr + i[:, None] * STRIDE + s[None], keep, 0.0)
        dots = tl.dot(q, k.T, input_precision="ieee")
        d_dots = _repeat(d_scores, I, QUERIES, KEYS) * w[:, None]
        d_dots = tl.where(dots > 0, d_dots, 0.0).to(k.dtype)
        dk = tl.dot(d_dots.T, q, dk, input_precision="ieee")
    tl.store(dk_ptr + place, dk, (s < S)[:, None])


@triton.jit
@typing.no_type_check
def _span(lo, hi):
    # The keys that any of the queries sees: from, to; to is 0 where there is none.
    first = tl.min(tl.where(lo < hi, lo, 2147483647), 0)
    end = tl.max(tl.where(lo < hi, hi, 0), 0)
    return tl.minimum(first, end), end


@triton.jit
@typing.no_type_check
def _load_rows(
    q_ptr, w_ptr, start_ptr, group,
    T: tl.constexpr, I: tl.constexpr, J: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    # q [queries times heads, J] and weights of heads, of a tile of the chunk.
    t = tl.load(start_ptr + 1) + group * QUERIES
    row = (tl.load(start_ptr).to(tl.int64) * T + t) * I
    local = tl.arange(0, QUERIES * I)
    is_row = local < (T - t) * I
    place = (row * J) + (local[:, None] * J + tl.arange(0, J)[None])
    q = tl.load(q_ptr + place, is_row[:, None], 0.0)
    w = tl.load(w_ptr + row + local, is_row, 0.0).to(tl.float32)
    return q, w


@triton.jit
@typing.no_type_check
def _scores(
    q, k, w, I: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Products after their ReLU, [queries times heads, KEYS], and their weighted sums.
    dots = tl.maximum(tl.dot(q, k.T, input_precision="ieee"), 0.0)
    return dots, tl.sum(tl.reshape(dots * w[:, None], [QUERIES, I, KEYS]), 1)


@triton.jit
@typing.no_type_check
def _repeat(x, I: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    # From queries to queries times heads.
    x = tl.broadcast_to(x[:, None, :], [QUERIES, I, KEYS])
    return tl.reshape(x, [QUERIES * I, KEYS])
