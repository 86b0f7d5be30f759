"""Rows of kv as a TPU can fetch them one by one.

A DMA cannot cut a row out of a [S, c] array in HBM, whose tiles are 8 rows high. In
[S, 1, W] words of 32 bits every row is one piece. A word of bfloat16 rows holds entries
i and W + i, so that a row unpacks into two planes of W lanes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

LANES = 128
QUERIES = 8  # of a grid step: the height of a tile of indices
CHUNK = 512  # rows fetched at a time: 0.8 MB of VMEM, 4 chunks a query
UNROLL = 16  # copies issued between two branches: 4.9 bundles each instead of 17


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of the rows of sequences."""

    num_keys: int  # of a sequence
    width: int  # c: entries of a row
    dtype: jnp.dtype

    @classmethod
    def of(cls, kv: Float[Array, "B S c"]) -> "Layout":
        """Of kv's rows."""
        return cls(kv.shape[1], kv.shape[2], kv.dtype)

    @property
    def planes(self) -> int:
        """Entries of a word."""
        return 4 // self.dtype.itemsize

    @property
    def words(self) -> int:
        """W: words of a row, whole vectors of lanes."""
        return -(-self.width // (self.planes * LANES)) * LANES

    def pack(self, rows: Float[Array, "*n c"]) -> Array:
        """[n, 1, W] words: int32, or float32 itself."""
        rows = rows.reshape(-1, self.width)
        rows = jnp.pad(rows, ((0, 0), (0, self.planes * self.words - self.width)))
        if self.planes == 2:
            low, high = jnp.split(lax.bitcast_convert_type(rows, jnp.uint16), 2, 1)
            rows = low.astype(jnp.uint32) | high.astype(jnp.uint32) << 16
            rows = lax.bitcast_convert_type(rows, jnp.int32)
        return rows[:, None]

    def unpack(self, words: Array, end: int | None = None) -> tuple[Array, ...]:
        """The first `end` entries of rows [n, W], cut where `cut` cuts."""
        if self.planes == 1:
            return (words[:, : end or self.width],)
        halves = (words << 16, words & jnp.int32(-1 << 16))
        sizes = self.sizes(end or self.width)
        return tuple(
            lax.bitcast_convert_type(half[:, :size], jnp.float32).astype(self.dtype)
            for half, size in zip(halves, sizes, strict=False)
        )

    def sizes(self, end: int) -> tuple[int, ...]:
        """Entries of each plane among the first `end`."""
        starts = range(0, end, self.words)
        return tuple(min(self.words, end - start) for start in starts)

    def cut(self, x: Array) -> tuple[Array, ...]:
        """Parts of the last axis that meet the planes."""
        starts = range(0, x.shape[-1], self.words)
        return tuple(x[..., start : start + self.words] for start in starts)


def chunk_size(topk: int) -> int:
    """Rows that are fetched at a time."""
    return min(CHUNK, topk)


def tile(*sizes: int, memory_space: Any = None) -> pl.BlockSpec:
    """QUERIES queries of [B, T, *sizes], for a grid (B, T / QUERIES)."""
    return pl.BlockSpec(
        (None, QUERIES, *sizes),
        lambda b, t: (b, t, *[0] * len(sizes)),
        memory_space=memory_space,
    )


def pad_queries(x: Array, fill: int = 0) -> Array:
    """[B, T, ...] with T a multiple of QUERIES."""
    widths = [(0, 0), (0, -x.shape[1] % QUERIES), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=fill) if widths[1][1] else x


def pad_list(indices: Array) -> Array:
    """[B, T, K] with T a multiple of QUERIES and K of chunks."""
    indices = pad_queries(indices, -1)
    missing = -indices.shape[-1] % chunk_size(indices.shape[-1])
    if not missing:
        return indices
    return jnp.pad(indices, ((0, 0), (0, 0), (0, missing)), constant_values=-1)


def num_listed(indices, query):  # noqa: ANN001, ANN201
    """Entries of a list [QUERIES, K] in SMEM before the first -1."""
    topk = indices.shape[-1]
    count = jnp.int32(0)
    for power in reversed(range(topk.bit_length())):
        probe = count + 2**power
        last = indices[query, jnp.minimum(probe, topk) - 1]
        count = jnp.where((probe <= topk) & (last >= 0), probe, count)
    return count


def for_listed(indices, query, first, chunk, start):  # noqa: ANN001, ANN201
    """Calls `start(slot, index)` for the `chunk` entries from `first` on."""
    unroll = UNROLL if chunk % UNROLL == 0 else 1

    def some(i, _):  # noqa: ANN001, ANN202
        for j in range(unroll):
            slot = i * unroll + j
            start(slot, indices[query, first + slot])
        return 0

    lax.fori_loop(0, chunk // unroll, some, 0)


def over_chunks(indices, rows, first_row, fetched, fetching, compute):  # noqa: ANN001, ANN201
    """Fetches a chunk while the one before it is computed, for QUERIES lists in SMEM.

    Args:
      indices: [QUERIES, K].
      rows: [n, 1, W] in HBM.
      first_row: that index 0 names.
      fetched: [2, chunk, 1, W] in VMEM.
      fetching: two semaphores.
      compute: `compute(query, first, count, words)`; `words()` waits for the words
        [chunk, W] of the entries from `first` on; `count` of the list's entries are no
        padding.
    """
    chunk = fetched.shape[1]

    def start(query, first, slot):  # noqa: ANN001, ANN202
        def copy(i, index):  # noqa: ANN001, ANN202
            row = rows.at[first_row + jnp.maximum(index, 0)]
            buffer, semaphore = fetched.at[slot, i], fetching.at[slot]
            pltpu.make_async_copy(row, buffer, semaphore).start()

        for_listed(indices, query, first, chunk, copy)

    def queries(query, step):  # noqa: ANN001, ANN202
        count = num_listed(indices, query)
        chunks = jnp.maximum((count + chunk - 1) // chunk, 1)

        def body(j, step):  # noqa: ANN001, ANN202
            is_last = j + 1 == chunks
            slot = step % 2

            @pl.when(jnp.logical_not(is_last & (query == QUERIES - 1)))
            def _():  # noqa: ANN202
                following = jnp.where(is_last, query + 1, query)
                start(following, jnp.where(is_last, 0, (j + 1) * chunk), 1 - slot)

            def words():  # noqa: ANN202
                wait_for(rows, fetched.at[slot], fetching.at[slot])
                return fetched[slot, :, 0]

            compute(query, j * chunk, count, words)
            return step + 1

        return lax.fori_loop(0, chunks, body, step)

    start(0, 0, 0)
    lax.fori_loop(0, QUERIES, queries, jnp.int32(0))


def wait_for(rows, buffer, semaphore):  # noqa: ANN001, ANN201
    """Waits for copies that fill the buffer: semaphores count bytes."""
    pltpu.make_async_copy(rows.at[pl.ds(0, buffer.shape[0])], buffer, semaphore).wait()


def dot(a, b, axis_a, axis_b):  # noqa: ANN001, ANN201
    """Product over an axis of each, in float32; exact where the operands are."""
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
