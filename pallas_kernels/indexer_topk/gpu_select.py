"""Triton kernels: scores of some queries, then the exact top-k of each.

The scoring kernel writes the scores [rows, S] and the maximum of every group of G
neighbouring keys. The selecting kernel first takes the K groups with the greatest
maxima, then the K greatest of their K G members. No key outside of these groups can be
among the top K, because each of the K groups has a key that ranks before it. So for any
scores a program reads only S / G + K G numbers, which fit in its registers, and finds
the K-th greatest by bisection. This is several times less work than four histograms of
S keys, and needs no atomics. Ties go to the lower index in both steps.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import (
    block_sizes,
    capabilities,
    dispatch,
    eight_bits,
    selection,
    triton_call,
)

KEYS = 64  # per scoring step
MAX_HEADS = 256
COLUMNS_FLOAT32 = 32  # without tensor cores; more would spill
QUERIES = 8  # per scoring program
PROGRAMS = 4  # two waves of two, per multiprocessor
BLOCK = 2048  # keys written at a time when selecting
UNSEEN = tl.constexpr(-0x7F800001)  # the integer of -inf
# Replaces a score of -inf, so that visible keys rank before invisible ones.
LEAST = tl.constexpr(-3.4028234663852886e38)
MIN_DEPTH_OF_CODES = 32  # depth of a product of 8 bits
MOST = 32768  # numbers in registers of a selecting program


@dataclasses.dataclass(frozen=True)
class Plan:
    """The queries that a call of `select` covers, and the form of its result."""

    sequences: int
    rows: int  # queries of each sequence
    topk: int
    as_bits: bool = False
    interpret: bool = False
    group: int | None = None  # keys of a group; by default `group_size`


def unsupported(
    q: Array, k: Array, w: Array, num_keys: int, topk: int, has_codes: bool
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    heads, dim = q.shape[-2:]
    if heads & (heads - 1) or heads > MAX_HEADS or dim & (dim - 1) or dim < 16:
        return (
            f"heads must be a power of two up to {MAX_HEADS} and their dim one of 16 "
            f"or more, got {heads} and {dim}."
        )
    if (
        has_codes
        and (dispatch.capability() or capabilities.FLOAT8) < capabilities.FLOAT8
    ):
        return "codes of float8_e4m3fn need compute capability 8.9."
    if eight_bits.are_codes(q) and dim < MIN_DEPTH_OF_CODES:
        return f"products of 8 bits need {MIN_DEPTH_OF_CODES} dims a head, got {dim}."
    halves = jnp.bfloat16, jnp.float16
    if not has_codes and (q.dtype != k.dtype or q.dtype not in (*halves, jnp.float32)):
        return f"q and k must share a float dtype, got {q.dtype} and {k.dtype}."
    if w.dtype != jnp.float32:
        return f"w must be float32, got {w.dtype}."
    if _work(num_keys, topk, group_size(num_keys, topk)) > MOST:
        return f"top {topk} of {num_keys} keys do not fit a program's registers."
    return None


def select(
    q: Float[Array, "B T I J"],
    k: Float[Array, "pages s J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    start: Int[Array, "2"],
    table: Int[Array, "B n"] | None,
    plan: Plan,
    exponents: Int[Array, "pages s"] | None = None,
) -> Int[Array, "sequences K"] | UInt32[Array, "sequences W"]:
    """Returns lists or bits for `plan.rows` queries of `plan.sequences` sequences each.

    Args:
      q: indexer queries.
      k: keys, a row per sequence; or P pages of s keys.
      w: head weights.
      lo: first visible key.
      hi: end of the visible keys.
      start: first sequence, and first query of each.
      table: page of each run of s keys of a sequence; None without pages.
      plan: sizes. A = sequences * rows.
      exponents: of the rows of k, if they are codes.
    """
    num_keys = k.shape[1] * (1 if table is None else table.shape[1])
    scores, maxima = scored(q, k, w, lo, hi, start, table, plan, exponents)
    return chosen(scores, maxima, lo, hi, start, num_keys, plan)


def group_size(num_keys: int, topk: int) -> int:
    """Returns the G that gives the selecting program the least work."""
    sizes = [2**i for i in range(KEYS.bit_length())]
    return min(sizes, key=lambda group: _work(num_keys, topk, group, total=True))


def _work(num_keys: int, topk: int, group: int, total: bool = False) -> int:
    """Returns how many numbers a selecting program reads: the larger step, or both."""
    first = triton.next_power_of_2(triton.cdiv(num_keys, group))
    second = triton.next_power_of_2(topk) * group if group > 1 else 0
    return first + second if total else max(first, second)


def block_queries(q: Array, rows: int) -> int:
    """Returns the queries of a scoring program."""
    columns = block_sizes.gpu().indexer_scores.sizes[0]
    columns = COLUMNS_FLOAT32 if q.dtype == jnp.float32 else columns
    heads = q.shape[2]
    block = min(triton.next_power_of_2(rows), max(columns // heads, 1), QUERIES)
    return max(block, 16 // heads)  # a product has 16 columns or more


def scored(q, k, w, lo, hi, start, table, plan, exponents=None):
    """Computes scores [sequences * padded rows, padded S], and their groups' maxima."""
    _, num_queries, heads, dim = q.shape
    page, pages = k.shape[1], 1 if table is None else table.shape[1]
    num_keys = page * pages
    block, tile = block_queries(q, plan.rows), block_sizes.gpu().indexer_scores
    blocks = triton.cdiv(plan.rows, block)
    group = plan.group or group_size(num_keys, plan.topk)
    stride = triton.cdiv(num_keys, KEYS) * KEYS
    rows = plan.sequences * blocks * block
    programs = PROGRAMS * block_sizes.gpu().cores
    splits = max(programs // (plan.sequences * blocks), 1)  # no third, partial wave
    return triton_call.call(
        _scores_kernel,
        q,
        k,
        w,
        lo,
        hi,
        start,
        start if table is None else table,
        start if exponents is None else exponents,
        out_shape=[
            jax.ShapeDtypeStruct((rows, stride), jnp.float32),
            # Groups of one key need no maxima.
            jax.ShapeDtypeStruct(
                (rows if group > 1 else 1, stride // group), jnp.float32
            ),
        ],
        grid=(plan.sequences * blocks, min(splits, stride // KEYS)),
        num_warps=8 if q.dtype == jnp.float32 else tile.warps,
        num_stages=tile.stages + (table is not None),  # one more stage to look up pages
        interpret=plan.interpret,
        T=num_queries,
        S=num_keys,
        I=heads,
        J=dim,
        PAGE=page,
        PAGES=pages,
        IS_PAGED=table is not None,
        HAS_CODES=exponents is not None,
        STRIDE=stride,
        QUERIES=block,
        BLOCKS=blocks,
        KEYS=KEYS,
        GROUP=group,
    )


def chosen(scores, maxima, lo, hi, start, num_keys, plan):
    """Returns lists or bits of the top-k; see `select`."""
    group = plan.group or group_size(num_keys, plan.topk)
    groups = triton.next_power_of_2(triton.cdiv(num_keys, group))
    slots = triton.next_power_of_2(plan.topk)
    work = _work(num_keys, plan.topk, group)
    words = selection.num_words(num_keys)
    out = (words, jnp.uint32) if plan.as_bits else (plan.topk, jnp.int32)
    rows = plan.sequences * plan.rows
    return triton_call.call(
        _select_kernel,
        scores,
        maxima,
        lo,
        hi,
        start,
        out_shape=[
            jax.ShapeDtypeStruct((rows, out[0]), out[1]),
            jax.ShapeDtypeStruct((rows if group > 1 else 1, plan.topk), jnp.int32),
        ],
        grid=(rows,),
        num_warps=min(max(work // 1024, 4), 16),
        num_stages=1,
        zeroed_outputs=(0,) if plan.as_bits else (),
        interpret=plan.interpret,
        T=lo.shape[1],
        K=plan.topk,
        STRIDE=scores.shape[1],
        WORDS=words,
        ROWS=plan.rows,
        PADDED_ROWS=scores.shape[0] // plan.sequences,
        GROUP=group,
        GROUPS=groups,
        SLOTS=slots,
        WIDTH=slots * group if group > 1 else groups,
        BLOCK=min(BLOCK, groups, slots * group),
        AS_BITS=plan.as_bits,
    )[0]


@triton.jit
@typing.no_type_check
def _scores_kernel(
    q_ptr, k_ptr, w_ptr, lo_ptr, hi_ptr, start_ptr, table_ptr, exponents_ptr,
    scores_ptr, maxima_ptr,
    T: tl.constexpr, S: tl.constexpr, I: tl.constexpr, J: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, IS_PAGED: tl.constexpr,
    HAS_CODES: tl.constexpr, STRIDE: tl.constexpr, QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Keys are the rows of a product, heads of queries its columns, so that a sum over
    # heads stays within four threads.
    block = tl.program_id(0)
    sequence = (tl.load(start_ptr) + block // BLOCKS).to(tl.int64)
    first_query = tl.load(start_ptr + 1) + block % BLOCKS * QUERIES
    t = first_query + tl.arange(0, QUERIES)
    lo = tl.load(lo_ptr + sequence * T + t, t < T, 0)
    hi = tl.load(hi_ptr + sequence * T + t, t < T, 0)
    sees = lo < hi
    start = tl.maximum(tl.min(tl.where(sees, lo, S)), 0)
    end = tl.minimum(tl.max(tl.where(sees, hi, 0)), S)

    column, j = tl.arange(0, QUERIES * I), tl.arange(0, J)
    is_query = first_query + column // I < T
    at = (sequence * T + first_query) * I
    q_ptr += at * J + column[:, None] * J + j[None]
    q = tl.load(q_ptr, is_query[:, None], 0.0)
    w = tl.load(w_ptr + at + column, is_query, 0.0)
    row = block * QUERIES + tl.arange(0, QUERIES).to(tl.int64)[None]
    first = start // KEYS + tl.program_id(1)
    for step in range(first, (end + KEYS - 1) // KEYS, tl.num_programs(1)):
        s = step * KEYS + tl.arange(0, KEYS)
        is_key = (s >= start) & (s < end)  # pages of other keys may be unknown
        if IS_PAGED:
            page = tl.load(table_ptr + sequence * PAGES + s // PAGE, is_key, 0)
            key = page.to(tl.int64) * PAGE + s % PAGE
        else:
            key = sequence * S + s
        k = tl.load(k_ptr + key[:, None] * J + j[None], is_key[:, None], 0.0)
        if HAS_CODES and q.dtype != k.dtype:
            k = k.to(tl.float32).to(q.dtype)
        products = tl.dot(k, q.T, input_precision="ieee")
        products = tl.maximum(products, 0.0) * w[None]
        scores = tl.sum(tl.reshape(products, [KEYS, QUERIES, I]), 2)
        if HAS_CODES:
            exponent = tl.load(exponents_ptr + key, is_key, 0).to(tl.int32)
            exponent = tl.maximum(exponent, -126)
            scores *= ((exponent + 127) << 23).to(tl.float32, bitcast=True)[:, None]
        tl.store(scores_ptr + row * STRIDE + s[:, None], scores)
        if GROUP > 1:
            visible = (s[:, None] >= lo[None]) & (s[:, None] < hi[None])
            grouped = tl.where(visible, _finite(scores), -float("inf"))
            grouped = tl.reshape(grouped, [KEYS // GROUP, GROUP, QUERIES])
            g = step * (KEYS // GROUP) + tl.arange(0, KEYS // GROUP)
            place = row * (STRIDE // GROUP) + g[:, None]
            tl.store(maxima_ptr + place, tl.max(grouped, 1))


@triton.jit
@typing.no_type_check
def _select_kernel(
    scores_ptr, maxima_ptr, lo_ptr, hi_ptr, start_ptr, out_ptr, groups_ptr,
    T: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, WORDS: tl.constexpr,
    ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    AS_BITS: tl.constexpr,
):  # fmt: skip
    # Only the bisections hold a whole row; their result is written by blocks.
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(start_ptr + 1) + (row % ROWS).to(tl.int32)
    place = (tl.load(start_ptr) + row // ROWS) * T + t
    lo = tl.maximum(tl.load(lo_ptr + place, t < T, 0), 0)
    hi = tl.load(hi_ptr + place, t < T, 0)
    padded = row // ROWS * PADDED_ROWS + row % ROWS
    scores_ptr += padded * STRIDE
    maxima_ptr += padded * (STRIDE // GROUP)
    groups_ptr += row * K

    members = GROUPS
    if GROUP > 1:
        first = lo // GROUP
        end = tl.where(lo < hi, (hi + GROUP - 1) // GROUP, first)
        maxima = visible(maxima_ptr, tl.arange(0, GROUPS), first, end)
        low, room = threshold(maxima, K)
        taken, ties = 0, 0
        for base in range(0, GROUPS, BLOCK):
            g = base + tl.arange(0, BLOCK)
            x = visible(maxima_ptr, g, first, end)
            best, slot, taken, ties = take(x, low, room, taken, ties)
            tl.store(groups_ptr + slot, g, best)
        tl.debug_barrier()  # other threads read these writes
        members = taken * GROUP

    _, whole = _member(scores_ptr, groups_ptr, 0, members, lo, hi, GROUP, WIDTH)
    low, room = threshold(whole, K)
    taken, ties = 0, 0
    for base in range(0, WIDTH, BLOCK):
        s, x = _member(scores_ptr, groups_ptr, base, members, lo, hi, GROUP, BLOCK)
        best, slot, taken, ties = take(x, low, room, taken, ties)
        if AS_BITS:
            word = s // 4096 * 128 + s % 128
            bit = (1 << (s % 4096 // 128)).to(tl.uint32, bitcast=True)
            # OR gives the same result in any order.
            tl.atomic_or(out_ptr + row * WORDS + word, bit, best, sem="relaxed")
        else:
            tl.store(out_ptr + row * K + slot, s, best)
    if not AS_BITS:
        free = tl.arange(0, SLOTS)
        tl.store(out_ptr + row * K + free, -1, (free >= taken) & (free < K))


@triton.jit
@typing.no_type_check
def _member(
    scores_ptr, groups_ptr, base, members, lo, hi,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Returns indices and scores of a block of the members of chosen groups.
    member = base + tl.arange(0, BLOCK)
    is_member = member < members
    s = member
    if GROUP > 1:
        s = tl.load(groups_ptr + member // GROUP, is_member, 0) * GROUP + member % GROUP
    return s, visible(scores_ptr, s, lo, tl.where(is_member, hi, lo))


@triton.jit
@typing.no_type_check
def visible(ptr, s, lo, hi):
    """Loads floats as integers that compare alike; UNSEEN if s is not in lo .. hi."""
    is_seen = (s >= lo) & (s < hi)
    x = _finite(tl.load(ptr + s, is_seen, 0.0))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(is_seen, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), UNSEEN)


@triton.jit
@typing.no_type_check
def _finite(x):
    # A NaN stays unchanged.
    return tl.where(x == -float("inf"), LEAST, x)


@triton.jit
@typing.no_type_check
def threshold(x, K: tl.constexpr):
    """Returns `low` and `room` of the K largest visible scores, or all if fewer.

    They are those above `low`, and the first `room` of those equal to it.
    """
    # Invariant: count(x >= low) = count >= K > count(x >= high), if K are visible.
    # Most often the loop ends early, with count = K.
    low = UNSEEN + 1
    high = tl.max(x) + 1
    count = tl.sum((x >= low).to(tl.int32))
    while (count > K) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # no overflow
        above = tl.sum((x >= middle).to(tl.int32))
        is_enough = above >= K
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
        count = tl.where(is_enough, above, count)
    return low, K - tl.sum((x > low).to(tl.int32))


@triton.jit
@typing.no_type_check
def take(x, low, room, taken, ties):
    """Returns marks of a block's chosen keys, their ranks, and the counts so far."""
    at = x == low
    rank = ties + tl.cumsum(at.to(tl.int32), 0)
    best = (x > low) | (at & (rank <= room))
    slot = taken + tl.cumsum(best.to(tl.int32), 0) - 1
    return best, slot, taken + tl.sum(best.to(tl.int32)), ties + tl.sum(at.to(tl.int32))
