"""Selection on GPUs, a chunk of queries at a time: no [T, S] array of scores.

A chunk's scores fill most of the L2 cache, as 2048 queries with 4096 keys do. Of long
rows a chunk has more than the cache holds, so that every multiprocessor selects for a
query: the selection reads few of the scores again.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import block_sizes, selection
from pallas_kernels.indexer_topk import gpu_select

CHUNK_BYTES = 40 * 10**6  # of the 50 MB cache of Hopper


def unsupported_indexer_topk(
    q: Array,
    k: Array,
    w: Array,
    lo: Array,
    hi: Array,
    topk: int,
    exponents: Array | None = None,
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    del lo, hi
    return gpu_select.unsupported(q, k, w, k.shape[1], topk, exponents is not None)


unsupported_indexer_bits = unsupported_indexer_mask = unsupported_indexer_topk


def indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
    exponents: Int[Array, "B S"] | None = None,
    *,
    interpret: bool = False,
) -> Int[Array, "B T K"]:
    """See `pallas_kernels.indexer_topk`."""
    return _by_chunks((q, k, w, lo, hi), topk, exponents, False, interpret)


def indexer_bits(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
    exponents: Int[Array, "B S"] | None = None,
    *,
    interpret: bool = False,
) -> UInt32[Array, "B T W"]:
    """See `pallas_kernels.indexer_bits`."""
    return _by_chunks((q, k, w, lo, hi), topk, exponents, True, interpret)


def indexer_mask(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
    exponents: Int[Array, "B S"] | None = None,
    *,
    interpret: bool = False,
) -> Bool[Array, "B S T"]:
    """See `pallas_kernels.indexer_mask`; made from bits, which are 8 times smaller."""
    bits = _by_chunks((q, k, w, lo, hi), topk, exponents, True, interpret)
    return selection.unpack(bits, k.shape[1])


def _by_chunks(arrays, topk, exponents, as_bits, interpret):
    """Scans over chunks of queries of one sequence."""
    q, k, w, lo, hi = arrays
    batch, num_queries = q.shape[:2]
    rows = _chunk_rows(
        num_queries, k.shape[1], gpu_select.block_queries(q, num_queries)
    )
    chunks = -(-num_queries // rows)
    plan = gpu_select.Plan(1, rows, topk, as_bits, interpret)

    def chunk(_: None, i: Array) -> tuple[None, Array]:
        start = jnp.stack([i // chunks, i % chunks * rows])
        return None, gpu_select.select(q, k, w, lo, hi, start, None, plan, exponents)

    _, out = lax.scan(chunk, None, jnp.arange(batch * chunks, dtype=jnp.int32))
    return out.reshape(batch, chunks * rows, -1)[:, :num_queries]


def _chunk_rows(num_queries: int, num_keys: int, block: int) -> int:
    """Returns the queries per chunk: whole blocks, for whole waves of selections.

    A multiprocessor selects for a query at a time. A chunk that does not divide T
    costs a copy of the lists, to cut off their end: less than a fifth of the waves.
    """
    cores = block_sizes.gpu().cores
    most = max(CHUNK_BYTES // (4 * num_keys) // block, cores // block, 1)
    sizes = [n * block for n in range(most, most // 2, -1)]
    waves = lambda size: -(-size // cores) / size  # for a query
    best = min(sizes, key=waves)
    even = min((n for n in sizes if num_queries % n == 0), key=waves, default=best)
    best = even if waves(even) < 1.2 * waves(best) else best
    return min(best, -(-num_queries // block) * block)
