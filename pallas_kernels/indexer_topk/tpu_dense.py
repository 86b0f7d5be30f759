"""Exact selection on TPUs: the scores of a few queries stay in VMEM.

Keys stream past a block of QUERIES queries; every score becomes an int32 of the same
order. Bisection by counting finds the K-th largest of each row, and a second bisection,
on the index, cuts ties. The kernel writes one bit per key; HBM holds no scores.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import block_sizes, cost, selection, tiles
from pallas_kernels.indexer_topk import tpu_list_from_bits

QUERIES = 16  # per block: one bfloat16 tile of a head
PRODUCT_KEYS = 256  # per product: all heads' float32 rows take 0.5 MB
PART_BYTES = 64 << 20  # of bits before they become lists
MAX_KEYS = 1 << 19  # 16 rows of scores take 32 MB, half of a v5p's VMEM
LANES = selection.LANES
LOWEST, HIGHEST = -(1 << 31), (1 << 31) - 1


def unsupported_indexer_bits(
    q: Array, k: Array, w: Array, lo: Array, hi: Array, topk: int
) -> str | None:
    """Returns why the kernel cannot take these shapes, or None."""
    del w, lo, hi, topk
    if q.shape[2] % 8 or q.shape[3] % LANES:
        return f"heads x dim must be multiples of 8 x {LANES}, got {q.shape[2:]}."
    if k.shape[1] > MAX_KEYS:
        return f"the scores of {k.shape[1]} keys do not fit VMEM; most are {MAX_KEYS}."
    return None


unsupported_indexer_topk = unsupported_indexer_bits


def indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
    *,
    interpret: bool = False,
) -> Int[Array, "B T K"]:
    """See `pallas_kernels.indexer_topk`; makes bits of some queries, then lists."""

    def part(_: None, q: Array, w: Array, lo: Array, hi: Array) -> tuple[None, Array]:
        bits = indexer_bits(q, k, w, lo, hi, topk, interpret=interpret)
        return None, tpu_list_from_bits.list_from_bits(bits, topk, interpret=interpret)

    most = max(PART_BYTES // (4 * selection.num_words(k.shape[1])), QUERIES)
    rows = _part_rows(q.shape[1], most)
    return tiles.over_queries(part, None, q, w, lo, hi, rows=rows)[1]


def _part_rows(num_queries: int, most: int) -> int:
    """Returns the rows of equal parts, if possible unpadded: padding would copy q."""
    least = -(-num_queries // most)
    nums = range(least, 2 * least + 1)
    num = next((n for n in nums if num_queries % (n * QUERIES) == 0), least)
    return -(-num_queries // (num * QUERIES)) * QUERIES


def indexer_bits(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
    *,
    interpret: bool = False,
) -> UInt32[Array, "B T W"]:
    """See `pallas_kernels.indexer_bits`."""
    batch, num_queries, heads, dim = q.shape
    num_keys, words = k.shape[1], selection.num_words(k.shape[1])
    bounds = jnp.stack([jnp.maximum(lo, 0), jnp.minimum(hi, num_keys)], axis=-1)
    q, w, bounds = (_pad(x, QUERIES) for x in (q, w.astype(jnp.float32), bounds))
    sizes = block_sizes.tpu()
    k = _pad(k, sizes.indexer_keys)
    blocks = q.shape[1] // QUERIES

    def rows(*shape: int) -> pl.BlockSpec:
        zeros = (0,) * (len(shape) - 1)
        return pl.BlockSpec((1, QUERIES, *shape[1:]), lambda b, i, _: (b, i, *zeros))

    bits = pl.pallas_call(
        functools.partial(_kernel, topk=topk),
        out_shape=jax.ShapeDtypeStruct((batch, q.shape[1], words), jnp.uint32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, blocks),
            in_specs=[
                rows(QUERIES, heads, dim),
                rows(QUERIES, heads),
                rows(QUERIES, 2),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=rows(QUERIES, words),
            scratch_shapes=[
                pltpu.VMEM((QUERIES * heads, dim), jnp.float32),
                pltpu.VMEM((heads * QUERIES, dim), q.dtype),
                pltpu.VMEM((heads, QUERIES, LANES), jnp.float32),
                pltpu.VMEM((2, sizes.indexer_keys, dim), k.dtype),
                pltpu.VMEM((QUERIES, words * 32), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        cost_estimate=cost.estimate(
            2 * batch * cost.seen_pairs(num_queries, num_keys) * heads * dim, q, w, k
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=sizes.vmem_bytes,
        ),
        interpret=interpret,
        name="indexer_bits",
    )(_key_blocks(bounds, topk, sizes.indexer_keys), q, w, bounds, k)
    return bits[:, :num_queries]


def _pad(x: Array, multiple: int) -> Array:
    """Appends zeros to axis 1 up to a multiple; bounds of 0 see nothing."""
    size = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, size), *[(0, 0)] * (x.ndim - 2)]) if size else x


def _key_blocks(bounds: Int[Array, "B T 2"], topk: int, size: int) -> Int[Array, " n"]:
    """Returns each query block's range of key blocks, and whether a row must choose."""
    rows = bounds.reshape(-1, QUERIES, 2)
    lo, hi = rows[..., 0], rows[..., 1]
    end = jnp.max(jnp.where(lo < hi, hi, 0), axis=1)
    first = jnp.minimum(jnp.min(jnp.where(lo < hi, lo, HIGHEST), axis=1), end)
    must_choose = jnp.any(hi - lo > topk, axis=1)
    return jnp.stack([first // size, -(-end // size), must_choose], axis=1).ravel()


def _kernel(blocks: Any, *refs: Any, topk: int) -> None:
    """Processes a query block: scores of all keys in reach, thresholds, bits."""
    q_ref, w_ref, bounds_ref, k_hbm, out_ref, *scratch = refs
    staging, q_heads, w_lanes, k_buffer, keys, semaphores = scratch
    b, i, size = pl.program_id(0), pl.program_id(1), k_buffer.shape[1]
    first, end, must_choose = (
        blocks[3 * (b * pl.num_programs(1) + i) + n] for n in range(3)
    )
    lo, hi = bounds_ref[0, :, 0:1], bounds_ref[0, :, 1:2]
    _heads_first(q_ref, w_ref, staging, q_heads, w_lanes)

    def fetch(j: Array) -> Any:
        source = k_hbm.at[b, pl.ds(pl.multiple_of(j * size, size), size)]
        return pltpu.make_async_copy(source, k_buffer.at[j & 1], semaphores.at[j & 1])

    def score(j: Array, _: None) -> None:
        @pl.when(j + 1 < end)
        def _() -> None:
            fetch(j + 1).start()

        fetch(j).wait()
        for n in range(size // PRODUCT_KEYS):
            at = pl.ds(n * PRODUCT_KEYS, PRODUCT_KEYS)
            place = pl.ds(_aligned(j * size + n * PRODUCT_KEYS), PRODUCT_KEYS)
            s = j * size + n * PRODUCT_KEYS + _lanes(PRODUCT_KEYS)
            scores = _scores(q_heads[...], k_buffer[j & 1, at], w_lanes)
            keys[:, place] = jnp.where((s >= lo) & (s < hi), _ordered(scores), LOWEST)

    def take_all(j: Array, _: None) -> None:
        s = j * size + _lanes(size)
        keys[:, pl.ds(_aligned(j * size), size)] = jnp.where(
            (s >= lo) & (s < hi), 0, LOWEST
        )

    @pl.when(must_choose == 1)
    def _() -> None:
        fetch(first).start()
        lax.fori_loop(first, end, score, None)

    @pl.when(must_choose == 0)
    def _() -> None:
        lax.fori_loop(first, end, take_all, None)

    reach = (first, end, size)
    threshold, cut = _thresholds(keys, reach, jnp.maximum(hi - lo, 0), topk)
    _write(keys, reach, threshold, cut, out_ref)


def _heads_first(q_ref, w_ref, staging, q_heads, w_lanes):
    """Groups rows by head, so that weighted sums are over whole registers.

    It reads rows by stride in float32, because a register never packs two float32 rows.
    """
    heads = w_ref.shape[2]
    staging[...] = q_ref[0].astype(jnp.float32).reshape(staging.shape)
    for n in range(heads):
        rows = staging[pl.ds(n, QUERIES, stride=heads)]
        q_heads[n * QUERIES : (n + 1) * QUERIES] = rows.astype(q_heads.dtype)
        w_lanes[n] = jnp.broadcast_to(w_ref[0, :, n : n + 1], (QUERIES, LANES))


def _scores(q: Array, k: Array, w_lanes: Any) -> Float[Array, "Q S"]:
    """Computes the sum over heads of w ReLU(q . k) from q [heads * Q, J], k [S, J]."""
    is_exact = q.dtype == jnp.float32
    dots = lax.dot_general(
        q,
        k,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if is_exact else None,
    )
    columns = []
    for n in range(0, k.shape[0], LANES):
        total = jnp.zeros((QUERIES, LANES), jnp.float32)
        for head in range(w_lanes.shape[0]):
            part = dots[head * QUERIES : (head + 1) * QUERIES, n : n + LANES]
            total += jnp.maximum(part, 0) * w_lanes[head]
        columns.append(total)
    return jnp.concatenate(columns, axis=1)


def _ordered(x: Float[Array, "Q S"]) -> Int[Array, "Q S"]:
    """Returns int32 that compare like the floats; -0.0 equals 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ HIGHEST, bits)


def _thresholds(
    keys: Any, reach: tuple, visible: Int[Array, "Q 1"], topk: int
) -> tuple[Array, Array]:
    """Finds threshold and cut [Q, 1]: rows take keys above it, or equal before the cut.

    Bisection keeps count(low) >= topk > count(high); count(x) is of keys >= x. It ends
    once count(low) is topk in every row, mostly after some 25 of 32 steps. `reach` is
    the first key block, the end of the key blocks, and the keys per block.
    """
    first, end, size = reach

    def count(is_in: Any) -> Int[Array, "Q 1"]:
        def block(j: Array, total: Array) -> Array:
            for n in range(0, size, LANES):
                s = j * size + n
                total += is_in(keys[:, pl.ds(_aligned(s), LANES)], s).astype(jnp.int32)
            return total

        zeros = jnp.zeros((QUERIES, LANES), jnp.int32)
        total = lax.fori_loop(first, end, block, zeros)
        return jnp.sum(total, axis=1, keepdims=True)

    def halve(state: tuple) -> tuple:
        low, high, above_low, above_high = state
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # no overflow
        above = count(lambda x, s: x >= middle)
        is_low = above >= topk
        return (
            jnp.where(is_low, middle, low),
            jnp.where(is_low, high, middle),
            jnp.where(is_low, above, above_low),
            jnp.where(is_low, above_high, above),
        )

    def is_open(state: tuple) -> Array:
        low, high, above_low, _ = state
        return jnp.any((above_low > topk) & (low + 1 < high))

    zeros = jnp.zeros((QUERIES, 1), jnp.int32)
    state = (zeros + (LOWEST + 1), zeros + HIGHEST, visible, zeros)
    low, _, above_low, above_high = lax.while_loop(is_open, halve, state)
    has_ties = above_low > topk
    room = topk - above_high  # for ties at the threshold

    def halve_index(state: tuple) -> tuple:
        short, enough = state  # the cut is in short + 1 .. enough
        middle = (short + enough) >> 1
        before = count(lambda x, s: (x == low) & (s + _lanes(LANES) < middle))
        is_short = before < room
        return jnp.where(is_short, middle, short), jnp.where(is_short, enough, middle)

    def is_index_open(state: tuple) -> Array:
        short, enough = state
        return jnp.any(has_ties & (short + 1 < enough))

    bounds = (zeros + first * size, zeros + end * size)
    _, cut = lax.while_loop(is_index_open, halve_index, bounds)
    return low, jnp.where(has_ties, cut, HIGHEST)


def _write(keys, reach, threshold, cut, out_ref):
    """Packs the selection: key s of a run is bit s // 128 of word s % 128."""
    first, end, size = reach
    per_run = selection.RUN // size
    first_run, end_run = first // per_run, (end + per_run - 1) // per_run

    def clear(j: Array, _: None) -> None:
        nothing = jnp.full((QUERIES, size), LOWEST, jnp.int32)
        keys[:, pl.ds(_aligned(j * size), size)] = nothing

    lax.fori_loop(first_run * per_run, first, clear, None)
    lax.fori_loop(end, end_run * per_run, clear, None)
    out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    def run(r: Array, _: None) -> None:
        words = jnp.zeros((QUERIES, LANES), jnp.int32)
        for n in range(32):
            s = r * selection.RUN + n * LANES
            x = keys[:, pl.ds(_aligned(s), LANES)]
            is_at = (x == threshold) & (s + _lanes(LANES) < cut)
            bit = (1 << n) - ((n == 31) << 32)  # as an int32
            words |= jnp.where((x > threshold) | is_at, bit, 0)
        out_ref[0, :, pl.ds(_aligned(r * LANES), LANES)] = words.astype(jnp.uint32)

    lax.fori_loop(first_run, end_run, run, None)


def _lanes(size: int) -> Int[Array, "Q S"]:
    """Returns 0 .. size - 1 in every row."""
    return lax.broadcasted_iota(jnp.int32, (QUERIES, size), 1)


def _aligned(s: Array) -> Array:
    """Tells the compiler that a vector starts on a lane tile."""
    return pl.multiple_of(s, LANES)
