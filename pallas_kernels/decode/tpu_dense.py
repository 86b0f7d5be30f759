"""Top-k cached keys on TPU: keys pass through VMEM once, and scores stay there.

The sublanes of a vector are a group of 8 queries, from one sequence or several.
Bisection on the bits finds the k-th largest score: it counts the scores in VMEM 32
times. Among equal scores, bisection on the index finds the cut. The kernel writes the
selection as bits, from which `list_from_bits` makes lists.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import cost, eight_bits, mapped, selection
from pallas_kernels.decode import reference
from pallas_kernels.indexer_topk import tpu_list_from_bits

QUERIES = 8  # sublanes of a vector
LANES = selection.LANES
CHUNK = 1024  # keys fetched and scored at a time
COUNTED = 2048  # keys counted between two branches
ROWS, CODE_ROWS = 16, 32  # of a tile, in bfloat16 and in bytes: pages are whole tiles
SMEM_BYTES = 512 * 1024  # limit of a page table
VMEM_KEYS = 1 << 20  # as many scores fit: 32 MB
VMEM_CODES = 1 << 18  # scores, and two buffers of factors: 24 MB
LOWEST, HIGHEST = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max


def decode_indexer_topk(
    q: Float[Array, "B T I J"],
    k: Shaped[Array, "pages s J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    page_table: Int[Array, "B n"] | None,
    topk: int,
    exponents: Int[Array, "pages s"] | None = None,
    *,
    interpret: bool = False,
) -> Int[Array, "B T K"]:
    """See `pallas_kernels.decode_indexer_topk`."""
    batch, num_queries, _, width = q.shape
    if eight_bits.are_codes(q):
        q = q.astype(jnp.bfloat16)
    rows = 1 << (num_queries - 1).bit_length()  # per group, for one sequence
    size = math.gcd(k.shape[1], CHUNK)  # keys per copy
    split = k.shape[1] // size
    table = jnp.arange(batch)[:, None] if page_table is None else page_table
    pages = table[:, :, None] * split + jnp.arange(split)[None, None]
    pages = pages.reshape(batch, -1).astype(jnp.int32)

    def grouped(x: Array) -> Array:
        """Reshapes [B, T, ...] to [groups, 8, ...]."""
        widths = [(0, -batch % (QUERIES // rows)), (0, rows - num_queries)]
        x = jnp.pad(x, [*widths, *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(-1, QUERIES, *x.shape[2:])

    factors = []
    if exponents is not None:
        rows_of_each = reference.rows(exponents, page_table)
        factors = [grouped(_factors(rows_of_each, num_queries))]
    q, w, lo, hi = (grouped(x) for x in (q, w, lo, hi))
    missing = len(q) * (QUERIES // rows) - batch
    bits = _select(
        (q.reshape(len(q), -1, width), w.reshape(len(w), -1, 1)),
        k.reshape(-1, size, width),
        factors,
        (lo, hi),
        jnp.pad(pages, ((0, missing), (0, 0))),
        batch,
        topk,
        interpret,
    )
    lists = tpu_list_from_bits.list_from_bits(bits, topk, interpret=interpret)
    return lists.reshape(-1, rows, topk)[:batch, :num_queries]


def unsupported_decode_indexer_topk(
    q: Array,
    k: Array,
    w: Array,
    lo: Array,
    hi: Array,
    page_table: Array | None,
    topk: int,
    exponents: Array | None = None,
) -> str | None:
    """Returns why shapes or dtypes cannot be taken."""
    del w, lo, hi, topk
    rows, most = (ROWS, VMEM_KEYS) if exponents is None else (CODE_ROWS, VMEM_CODES)
    num_keys = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    table = 4 * q.shape[0] * num_keys // math.gcd(k.shape[1], CHUNK)
    if q.shape[1] > QUERIES:
        return f"at most {QUERIES} queries a sequence, got {q.shape[1]}"
    if k.shape[1] % rows:
        return f"pages must be multiples of {rows} tokens, got {k.shape[1]}"
    if table > SMEM_BYTES:
        return f"a page table of {table} bytes does not fit beside {SMEM_BYTES}"
    if num_keys > most:
        return f"at most {most} keys a sequence, got {num_keys}"
    return None


def _factors(
    exponents: Int[Array, "B S"], num_queries: int
) -> Float[Array, "B T keys"]:
    """Returns the keys' powers of two for each query, zeros behind the last key."""
    num_keys = exponents.shape[1]
    missing = selection.num_words(num_keys) * 32 - num_keys
    powers = jnp.pad(eight_bits.power(exponents), ((0, 0), (0, missing)))
    return jnp.repeat(powers[:, None], num_queries, axis=1)


def _select(
    queries: tuple[Array, Array],
    k: Shaped[Array, "pages s J"],
    factors: Sequence[Array],
    bounds: tuple[Array, Array],
    pages: Int[Array, "B n"],
    batch: int,
    topk: int,
    interpret: bool,
) -> Array:
    """Returns the bits [G, 8, W] of groups of 8 queries.

    Args:
      queries: q [G, 8 I, J] and head weights [G, 8 I, 1].
      k: pages.
      factors: of the keys [G, 8, S], or nothing.
      bounds: lo and hi [G, 8].
      pages: page tables of all sequences, one after another.
      batch: sequences; the keys of those that fill a group up are not read.
      topk: keys to select.
      interpret: runs on CPU.
    """
    groups, heads_of_all, width = queries[0].shape
    rows = QUERIES * groups // len(pages)  # per sequence
    size = k.shape[1]
    num_keys = pages.shape[1] * size
    words = selection.num_words(num_keys)
    lo, hi = (x[..., None] for x in bounds)
    vmem = words * 32 * QUERIES * 4 * (1 + 2 * len(factors))  # scores, two of factors
    whole = lambda *sizes: pl.BlockSpec((None, *sizes), lambda g, *_: (g, 0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(groups,),
        in_specs=[
            (whole(heads_of_all, width), whole(heads_of_all, 1)),
            (whole(QUERIES, 1), whole(QUERIES, 1)),
            pl.BlockSpec(memory_space=pl.ANY),
            [whole(QUERIES, words * 32) for _ in factors],
        ],
        out_specs=whole(QUERIES, words),
        scratch_shapes=[
            pltpu.VMEM((QUERIES, words * 32), jnp.int32),
            pltpu.VMEM((2, CHUNK // size, size, width), k.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((QUERIES, LANES), jnp.int32),
        ],
    )
    return mapped.pallas_call(
        functools.partial(_kernel, rows=rows, topk=topk),
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct((groups, QUERIES, words), jnp.uint32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            disable_bounds_checks=True,
            vmem_limit_bytes=vmem + (24 << 20),
        ),
        cost_estimate=_cost(batch * num_keys, heads_of_all * rows // QUERIES, k),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="decode_indexer_topk",
    )(pages.reshape(-1), _spans(*bounds, rows), queries, (lo, hi), k, factors)


def _spans(lo: Array, hi: Array, rows: int) -> Array:
    """Returns the first key and the end of the keys that each sequence sees."""
    is_seen = lo < hi
    first = jnp.where(is_seen, lo, HIGHEST).reshape(-1, rows)
    end = jnp.where(is_seen, hi, 0).reshape(-1, rows)
    return jnp.stack([jnp.min(first, axis=1), jnp.max(end, axis=1)], axis=1).reshape(-1)


def _cost(keys: int, num_queries: int, k: Array) -> pl.CostEstimate:
    """Estimates the cost of scoring `keys` keys of full sequences."""
    return cost.estimate(2 * keys * num_queries * k.shape[-1], cost.rows(k, keys))


def _kernel(
    pages: Any,
    spans: Any,
    queries: tuple,
    bounds: tuple,
    k: Any,
    factors: Sequence,
    bits: Any,
    *scratch: Any,
    rows: int,
    topk: int,
):
    """Processes a group of queries, `rows` per sequence: score, order, cut, pack."""
    scores, fetched, fetching, cut = scratch
    sequences = QUERIES // rows
    first, end = jnp.int32(HIGHEST), jnp.int32(0)
    for i in range(sequences):
        sequence = pl.program_id(0) * sequences + i
        span = (spans[2 * sequence], spans[2 * sequence + 1])
        size = pages.shape[0] // (spans.shape[0] // 2)
        table = lambda j, first=sequence * size, last=size - 1: pages[
            first + jnp.minimum(j, last)
        ]
        heads = queries[0].shape[0] // sequences
        q, w = (x[i * heads : (i + 1) * heads] for x in queries)
        place = slice(i * rows, (i + 1) * rows)
        _score(q, w, k, factors, table, span, (scores, place), fetched, fetching)
        first, end = jnp.minimum(first, span[0]), jnp.maximum(end, span[1])
    _order(bounds, scores)
    tiles = (first // COUNTED, (end + COUNTED - 1) // COUNTED)
    _pack(scores, _threshold(scores, tiles, topk, cut), cut, bits)


def _score(q, w, k, factors, table, span, place, fetched, fetching):
    """Writes the bits of one sequence's scores to `place`: an array and its rows."""
    (scores, rows), copies = place, fetched.shape[1]
    first, end = span[0] // CHUNK, (span[1] + CHUNK - 1) // CHUNK
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dtype = jnp.float8_e4m3fn if factors else fetched.dtype  # bytes are its codes

    def start(chunk, slot):
        def copy(j, _):
            page, buffer = k.at[table(chunk * copies + j)], fetched.at[slot, j]
            pltpu.make_async_copy(page, buffer, fetching.at[slot]).start()

        lax.fori_loop(0, copies, copy, None)

    def body(chunk, _):
        slot = chunk % 2
        buffer = fetched.at[slot]

        @pl.when(chunk + 1 < end)
        def _():
            start(chunk + 1, 1 - slot)

        # One wait for all copies: semaphores count bytes.
        pltpu.make_async_copy(buffer, buffer, fetching.at[slot]).wait()
        keys = lax.bitcast_convert_type(buffer[...], dtype).reshape(CHUNK, -1)
        dots = lax.dot_general(
            q,
            keys.astype(q.dtype),
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        weighted = jnp.maximum(dots, 0) * w
        sums = jnp.sum(weighted.reshape(rows.stop - rows.start, -1, CHUNK), axis=1)
        place = pl.ds(pl.multiple_of(chunk * CHUNK, CHUNK), CHUNK)
        for factor in factors:
            sums *= factor[rows, place]
        scores[rows, place] = lax.bitcast_convert_type(sums, jnp.int32)

    @pl.when(first < end)
    def _():
        start(first, first % 2)

    lax.fori_loop(first, end, body, None)


def _order(bounds, scores):
    """Turns floats' bits into integers of the same order; hides invisible keys."""
    lo, hi = bounds[0][...], bounds[1][...]

    def tile(i, _):
        place = pl.ds(pl.multiple_of(i * COUNTED, COUNTED), COUNTED)
        x = scores[:, place]
        x = jnp.where(x == LOWEST, 0, x)  # -0.0
        x = jnp.where(x < 0, x ^ HIGHEST, x)
        key = i * COUNTED + lax.broadcasted_iota(jnp.int32, x.shape, 1)
        scores[:, place] = jnp.where((key >= lo) & (key < hi), x, LOWEST)

    lax.fori_loop(0, scores.shape[1] // COUNTED, tile, None)


def _threshold(scores, tiles, topk, cut):
    """Returns each query's k-th largest score [8, 1], and the cut among equal ones."""
    lane = lax.broadcasted_iota(jnp.int32, (QUERIES, LANES), 1)

    def count(test):
        def add(i, total):
            first = pl.multiple_of(i * COUNTED, COUNTED)
            for j in range(0, COUNTED, LANES):
                x = scores[:, pl.ds(first + j, LANES)]
                total += test(x, first + j + lane).astype(jnp.int32)
            return total

        total = lax.fori_loop(tiles[0], tiles[1], add, jnp.zeros_like(lane))
        return jnp.sum(total.astype(jnp.float32), axis=1, keepdims=True)  # exact

    def bisect(low, high, is_low):
        def halve(_, bounds):
            low, high = bounds
            middle = (low >> 1) + (high >> 1) + (low & high & 1)  # no overflow
            keep = is_low(middle)
            return jnp.where(keep, middle, low), jnp.where(keep, high, middle)

        bounds = (jnp.full((QUERIES, 1), x, jnp.int32) for x in (low, high))
        return lax.fori_loop(0, (high - low).bit_length(), halve, tuple(bounds))[0]

    threshold = bisect(
        LOWEST + 1, HIGHEST, lambda middle: count(lambda x, _: x >= middle) >= topk
    )
    room = topk - count(lambda x, _: x > threshold)
    at = count(lambda x, _: x == threshold)
    cut[...] = jnp.full_like(cut, HIGHEST)

    @pl.when(jnp.max(at - room) > 0)
    def _():
        before = lambda end: count(lambda x, key: (x == threshold) & (key < end))
        end = bisect(0, scores.shape[1] + 1, lambda middle: before(middle) <= room)
        cut[...] = jnp.broadcast_to(end, cut.shape)

    return threshold


def _pack(scores, threshold, cut, bits):
    """Packs bits of keys above the threshold, or equal to it before the cut."""
    cut = cut[...]
    lane = lax.broadcasted_iota(jnp.int32, cut.shape, 1)

    def run(i, _):
        words = jnp.zeros_like(cut)
        for j in range(selection.RUN // LANES):
            first = pl.multiple_of(i * selection.RUN + j * LANES, LANES)
            x = scores[:, pl.ds(first, LANES)]
            taken = (x > threshold) | ((x == threshold) & (first + lane < cut))
            words |= taken.astype(jnp.int32) << j
        place = pl.ds(pl.multiple_of(i * LANES, LANES), LANES)
        bits[:, place] = lax.bitcast_convert_type(words, jnp.uint32)

    lax.fori_loop(0, bits.shape[1] // LANES, run, None)
