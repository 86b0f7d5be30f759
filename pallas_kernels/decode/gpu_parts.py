"""Triton kernels: the exact top-k of few rows of scores, many programs a row.

A row's maxima of groups of keys bound its top K from below: K groups have a key that is
no less than the K-th greatest maximum. Every program finds this bound for itself, and
keeps of its part of the row the keys that reach it, K at most. With groups chosen so
that a row has two to four times K of them, that is little more than K keys of the whole
row if scores are as good as random. A second kernel takes the K best of what was kept,
from registers: of NEAR keys a row, else of all that the parts could keep. Both take the
lower index among equals, so the list is that of `gpu_select`.
"""

import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, triton_call
from pallas_kernels.indexer_topk import gpu_select

PARTS = 16  # of a row
ROWS = 4  # multiprocessors per row; with fewer, a program per row is as fast
NEAR = 4  # times K: kept keys of a row that the second kernel takes at once
WARPS = 8


def group_size(num_keys: int, topk: int) -> int:
    """Returns the keys of a group: two to four times K groups, if keys suffice."""
    most = max(num_keys // (2 * topk), 1)
    return min(1 << (most.bit_length() - 1), gpu_select.KEYS)


def is_worthwhile(rows: int, num_keys: int, topk: int) -> bool:
    """Tells whether several programs should select from a row of keys."""
    part = _part(num_keys)
    return (
        rows * ROWS <= block_sizes.gpu().cores
        and group_size(num_keys, topk) > 1
        and part >= gpu_select.BLOCK
        and max(part, PARTS * triton.next_power_of_2(topk)) <= gpu_select.MOST
    )


def chosen(
    scores: Float[Array, "A padded"],
    maxima: Float[Array, "A groups"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    num_keys: int,
    topk: int,
    interpret: bool,
) -> Int[Array, "rows K"]:
    """Returns the lists of all rows B T.

    Args:
      scores: of `gpu_select.scored`; A / B rows for the T queries of a sequence.
      maxima: of groups.
      lo: first visible key.
      hi: end of the visible keys.
      num_keys: of a row, without padding.
      topk: keys of a list.
      interpret: of `triton_call.call`.
    """
    kept = _kept_keys(scores, maxima, lo, hi, num_keys, topk, interpret)
    rows, parts = kept[-1].shape
    slots, padded_parts = map(triton.next_power_of_2, (topk, parts))
    return triton_call.call(
        _merge_kernel,
        *kept,
        out_shape=[jax.ShapeDtypeStruct((rows, topk), jnp.int32)],
        grid=(rows,),
        num_warps=2 * WARPS,
        num_stages=1,
        interpret=interpret,
        K=topk,
        PARTS=parts,
        PADDED_PARTS=padded_parts,
        NEAR=NEAR * slots,
        ALL=padded_parts * slots,
        SLOTS=slots,
        BLOCK=min(gpu_select.BLOCK, slots),
    )[0]


def _kept_keys(scores, maxima, lo, hi, num_keys, topk, interpret):
    """Returns keys and scores [rows, parts, K] of each part, and their number."""
    batch, num_queries = lo.shape
    part, group = _part(num_keys), group_size(num_keys, topk)
    rows, parts = batch * num_queries, triton.cdiv(num_keys, part)
    return triton_call.call(
        _keep_kernel,
        scores,
        maxima,
        lo,
        hi,
        out_shape=[
            jax.ShapeDtypeStruct((rows, parts, topk), jnp.int32),
            jax.ShapeDtypeStruct((rows, parts, topk), jnp.int32),
            jax.ShapeDtypeStruct((rows, parts), jnp.int32),
        ],
        grid=(rows, parts),
        num_warps=WARPS,
        num_stages=1,
        interpret=interpret,
        T=num_queries,
        K=topk,
        STRIDE=scores.shape[1],
        PADDED_ROWS=scores.shape[0] // batch,
        GROUP=group,
        GROUPS=triton.next_power_of_2(triton.cdiv(num_keys, group)),
        PART=part,
        BLOCK=gpu_select.BLOCK,
    )


def _part(num_keys: int) -> int:
    """Returns the keys of a part: a power of two."""
    return triton.next_power_of_2(triton.cdiv(num_keys, PARTS))


@triton.jit
@typing.no_type_check
def _keep_kernel(
    scores_ptr, maxima_ptr, lo_ptr, hi_ptr, keys_ptr, values_ptr, counts_ptr,
    T: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PADDED_ROWS: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Writes keys and scores of a part, ascending by key, and their number.
    row = tl.program_id(0).to(tl.int64)
    lo = tl.maximum(tl.load(lo_ptr + row), 0)
    hi = tl.load(hi_ptr + row)
    padded = row // T * PADDED_ROWS + row % T
    scores_ptr += padded * STRIDE
    maxima_ptr += padded * (STRIDE // GROUP)
    first = lo // GROUP
    end = tl.where(lo < hi, (hi + GROUP - 1) // GROUP, first)
    maxima = gpu_select.visible(maxima_ptr, tl.arange(0, GROUPS), first, end)
    bound, _ = gpu_select.threshold(maxima, K)

    start = tl.program_id(1) * PART
    whole = gpu_select.visible(scores_ptr, start + tl.arange(0, PART), lo, hi)
    whole = tl.where(whole >= bound, whole, gpu_select.UNSEEN)
    low, room = gpu_select.threshold(whole, K)
    place = (row * tl.num_programs(1) + tl.program_id(1)) * K
    taken, ties = 0, 0
    for base in range(0, PART, BLOCK):
        s = start + base + tl.arange(0, BLOCK)
        x = gpu_select.visible(scores_ptr, s, lo, hi)
        x = tl.where(x >= bound, x, gpu_select.UNSEEN)
        best, slot, taken, ties = gpu_select.take(x, low, room, taken, ties)
        tl.store(keys_ptr + place + slot, s, best)
        tl.store(values_ptr + place + slot, x, best)
    tl.store(counts_ptr + row * tl.num_programs(1) + tl.program_id(1), taken)


@triton.jit
@typing.no_type_check
def _merge_kernel(
    keys_ptr, values_ptr, counts_ptr, out_ptr,
    K: tl.constexpr, PARTS: tl.constexpr, PADDED_PARTS: tl.constexpr,
    NEAR: tl.constexpr, ALL: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    counts_ptr += row * PARTS
    keys_ptr += row * (PARTS * K)
    values_ptr += row * (PARTS * K)
    out_ptr += row * K
    part = tl.arange(0, PADDED_PARTS)
    total = tl.sum(tl.load(counts_ptr + part, part < PARTS, 0))
    if total <= NEAR:
        taken = _merged(
            keys_ptr, values_ptr, counts_ptr, out_ptr, K, PARTS, NEAR, SLOTS, BLOCK
        )
    else:
        taken = _merged(
            keys_ptr, values_ptr, counts_ptr, out_ptr, K, PARTS, ALL, SLOTS, BLOCK
        )
    free = tl.arange(0, SLOTS)
    tl.store(out_ptr + free, -1, (free >= taken) & (free < K))


@triton.jit
@typing.no_type_check
def _merged(
    keys_ptr, values_ptr, counts_ptr, out_ptr,
    K: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Writes the best of up to WIDTH kept keys; returns how many there are.
    _, whole = _kept(values_ptr, counts_ptr, 0, K, PARTS, WIDTH)
    low, room = gpu_select.threshold(whole, K)
    taken, ties = 0, 0
    for base in range(0, WIDTH, BLOCK):
        place, x = _kept(values_ptr, counts_ptr, base, K, PARTS, BLOCK)
        best, slot, taken, ties = gpu_select.take(x, low, room, taken, ties)
        tl.store(out_ptr + slot, tl.load(keys_ptr + place, best, 0), best)
    return taken


@triton.jit
@typing.no_type_check
def _kept(
    values_ptr, counts_ptr, base,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Returns places and scores of kept keys number base .. base + BLOCK of a row.
    i = base + tl.arange(0, BLOCK)
    place, end = i, 0
    for part in tl.static_range(PARTS):
        start = end
        end += tl.load(counts_ptr + part)
        place = tl.where((i >= start) & (i < end), part * K + i - start, place)
    x = tl.load(values_ptr + place, i < end, gpu_select.UNSEEN)
    return place, x
