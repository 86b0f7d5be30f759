"""A layout of kv in which a TPU can fetch single rows.

A DMA cannot fetch a single row of a [S, row] array in HBM, whose tiles have 8 rows and
128 lanes. In an array of 32-bit words that is exactly 128 lanes wide, tiles follow each
other: a row is V contiguous lines of 128 words. In VMEM, strided loads turn the
lines of many rows into a matrix. A word of bfloat16 rows holds entries i and 128 V + i,
so that a row unpacks into two planes. Padding reads an extra row before the first.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import block_sizes

LANES = 128
QUERIES = 8  # per grid step: the height of an index tile
UNROLL = 128  # copies issued between two branches: a tile of SMEM, plain addresses


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of the rows of sequences."""

    num_keys: int  # per sequence
    width: int  # c: entries of a row
    dtype: jnp.dtype

    @classmethod
    def of(cls, kv: Float[Array, "B S row"]) -> "Layout":
        """Returns kv's rows."""
        return cls(kv.shape[1], kv.shape[2], kv.dtype)

    @property
    def planes(self) -> int:
        """Entries per word."""
        return 4 // self.dtype.itemsize

    @property
    def lines(self) -> int:
        """V, the lines per row."""
        return -(-self.width // (self.planes * LANES))

    @property
    def words(self) -> int:
        """Words per row, which are the entries of a plane."""
        return self.lines * LANES

    def pack(self, rows: Float[Array, "B S row"]) -> Array:
        """[(1 + B * S) V, 128] words: int32, or float32 itself."""
        rows = rows.reshape(-1, self.width)
        rows = jnp.pad(rows, ((1, 0), (0, self.planes * self.words - self.width)))
        if self.planes == 2:
            low, high = jnp.split(lax.bitcast_convert_type(rows, jnp.uint16), 2, 1)
            rows = low.astype(jnp.uint32) | high.astype(jnp.uint32) << 16
            rows = lax.bitcast_convert_type(rows, jnp.int32)
        return rows.reshape(-1, LANES)

    def unpack(self, words: Any) -> tuple[Array, ...]:
        """Planes [n, 128 V] of rows in VMEM, a reference to [n V, 128] words."""
        tiles = [lane_tile(words, i, self.lines)[...] for i in range(self.lines)]
        words = jnp.concatenate(tiles, axis=1)
        if self.planes == 1:
            return (words[:, : self.width],)
        halves = (words << 16, words & jnp.int32(-1 << 16))
        return tuple(
            lax.bitcast_convert_type(half[:, :size], jnp.float32).astype(self.dtype)
            for half, size in zip(halves, self.sizes(self.width), strict=True)
        )

    def sizes(self, end: int) -> tuple[int, ...]:
        """Returns the entries of each plane among the first `end` of a row."""
        starts = range(0, end, self.words)
        return tuple(min(self.words, end - start) for start in starts)

    def cut(self, x: Array) -> tuple[Array, ...]:
        """Cuts the last axis into parts that match the planes."""
        starts = range(0, x.shape[-1], self.words)
        return tuple(x[..., start : start + self.words] for start in starts)


def lane_tile(rows, i, lines):
    """Loads line i of rows [n V, 128] in VMEM: [n, 128]."""
    return rows.at[pl.ds(i, rows.shape[0] // lines, stride=lines)]


def add_to(rows, at, x):
    """Adds x [n, w] to lanes at .. at + w - 1 of rows [n V, 128], whole tiles."""
    for i in range(0, x.shape[1], LANES):
        tile = lane_tile(rows, (at + i) // LANES, rows.shape[0] // x.shape[0])
        tile[...] += x[:, i : i + LANES]


def chunk_size(topk: int) -> int:
    """Returns the rows fetched at a time: 1024 take 1.5 MB of VMEM."""
    return min(block_sizes.tpu().sparse_rows, topk)


def tile(*sizes: int, memory_space: Any = None) -> pl.BlockSpec:
    """Specifies QUERIES queries of [B, T, *sizes], for a grid (B, T / QUERIES)."""
    return pl.BlockSpec(
        (None, QUERIES, *sizes),
        lambda b, t: (b, t, *[0] * len(sizes)),
        memory_space=memory_space,
    )


def num_parts(num_queries: int) -> int:
    """Returns the parts of padded queries with separate sums: one per core."""
    cores = block_sizes.tpu().cores
    return cores if num_queries // QUERIES % cores == 0 else 1


def tile_of_part(steps: int, *sizes: int, memory_space: Any = None) -> pl.BlockSpec:
    """Specifies QUERIES queries of [B, T, *sizes], for a grid (part, B, steps)."""
    return pl.BlockSpec(
        (None, QUERIES, *sizes),
        lambda part, b, t: (b, part * steps + t, *[0] * len(sizes)),
        memory_space=memory_space,
    )


def pad_queries(x: Array, fill: int = 0) -> Array:
    """Pads T of [B, T, ...] to a multiple of QUERIES."""
    widths = [(0, 0), (0, -x.shape[1] % QUERIES), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=fill) if widths[1][1] else x


def pad_list(indices: Array) -> Array:
    """Pads T of [B, T, K] to a multiple of QUERIES, and K to one of chunks."""
    indices = pad_queries(indices, -1)
    missing = -indices.shape[-1] % chunk_size(indices.shape[-1])
    if not missing:
        return indices
    return jnp.pad(indices, ((0, 0), (0, 0), (0, missing)), constant_values=-1)


def num_listed(indices, query):
    """Counts the entries before the first -1 of a list of [queries, K] in SMEM."""
    topk = indices.shape[-1]
    count = jnp.int32(0)
    for power in reversed(range(topk.bit_length())):
        probe = count + 2**power
        last = indices[query, jnp.minimum(probe, topk) - 1]
        count = jnp.where((probe <= topk) & (last >= 0), probe, count)
    return count


def for_listed(indices, query, first, chunk, start):
    """Calls `start(slot, index)` for the `chunk` entries from `first` on."""
    unroll = UNROLL if chunk % UNROLL == 0 else 1

    def some(i, _):
        base = pl.multiple_of(first + i * unroll, unroll)
        part = indices.at[pl.ds(query, 1), pl.ds(base, unroll)]
        for j in range(unroll):
            start(i * unroll + j, part[0, j])

    lax.fori_loop(0, chunk // unroll, some, None)


def over_chunks(
    indices: Any,
    rows: Any,
    first_row: Any,
    fetched: Any,
    fetching: Any,
    compute: Callable,
    lines: int = 1,
) -> None:
    """Fetches a chunk while the previous one is computed, for a few lists in SMEM.

    Args:
      indices: [queries, K].
      rows: [n * lines, ...] in HBM.
      first_row: row of index 0; padding reads the row before it.
      fetched: [2, chunk * lines, ...] in VMEM.
      fetching: two semaphores.
      compute: `compute(query, first, count, words)`; `words()` waits for the rows
        [chunk * lines, ...] of the entries from `first` on; `count` of the list's
        entries are no padding.
      lines: of a row.
    """
    num_queries, chunk = indices.shape[0], fetched.shape[1] // lines

    def start(query, first, slot):
        def copy(i, index):
            row = line(rows, first_row + index, lines)
            buffer = line(fetched.at[slot], i, lines)
            pltpu.make_async_copy(row, buffer, fetching.at[slot]).start()

        for_listed(indices, query, first, chunk, copy)

    def queries(query, step):
        count = num_listed(indices, query)
        chunks = jnp.maximum((count + chunk - 1) // chunk, 1)

        def body(j, step):
            is_last = j + 1 == chunks
            slot = step % 2

            @pl.when(jnp.logical_not(is_last & (query == num_queries - 1)))
            def _():
                following = jnp.where(is_last, query + 1, query)
                start(following, jnp.where(is_last, 0, (j + 1) * chunk), 1 - slot)

            def words():
                wait_for(fetched.at[slot], fetching.at[slot])
                return fetched.at[slot]

            compute(query, j * chunk, count, words)
            return step + 1

        return lax.fori_loop(0, chunks, body, step)

    start(0, 0, 0)
    lax.fori_loop(0, num_queries, queries, jnp.int32(0))


def line(rows, i, lines):
    """Returns row i of rows [n * lines, ...]."""
    return rows.at[pl.ds(i * lines, lines)]


def wait_for(buffer, semaphore):
    """Waits for copies that fill or empty the buffer: semaphores count bytes."""
    pltpu.make_async_copy(buffer, buffer, semaphore).wait()


def dot(a, b, axis_a, axis_b):
    """Multiplies over an axis of each, in float32, without rounding operands."""
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def product(parts, planes):
    """Returns the product [N, chunk] from the parts of the contracted axis."""
    products = [dot(a, b, 1, 1) for a, b in zip(parts, planes, strict=True)]
    return functools.reduce(jnp.add, products)


def column(row):
    """Transposes [1, N] to [N, 1]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]
