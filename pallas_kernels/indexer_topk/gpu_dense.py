"""Selection on GPUs, a chunk of queries at a time: no [T, S] array of scores.

A chunk's scores fill most of the L2 cache at any length: 2048 queries with 4096 keys,
or 48 queries with 202752.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import selection
from pallas_kernels.indexer_topk import gpu_select

CHUNK_BYTES = 40 * 10**6  # of the 50 MB cache of Hopper


def unsupported_indexer_topk(
    q: Array, k: Array, w: Array, lo: Array, hi: Array, topk: int
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    del lo, hi
    return gpu_select.unsupported(q, k, w, k.shape[1], topk)


unsupported_indexer_bits = unsupported_indexer_mask = unsupported_indexer_topk


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
    """See `pallas_kernels.indexer_topk`."""
    return _by_chunks(q, k, w, lo, hi, topk, False, interpret)


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
    return _by_chunks(q, k, w, lo, hi, topk, True, interpret)


def indexer_mask(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
    *,
    interpret: bool = False,
) -> Bool[Array, "B S T"]:
    """See `pallas_kernels.indexer_mask`; made from bits, which are 8 times smaller."""
    bits = _by_chunks(q, k, w, lo, hi, topk, True, interpret)
    return selection.unpack(bits, k.shape[1])


def _by_chunks(q, k, w, lo, hi, topk, as_bits, interpret):
    """Scans over chunks of queries of one sequence."""
    batch, num_queries = q.shape[:2]
    rows = _chunk_rows(
        num_queries, k.shape[1], gpu_select.block_queries(q, num_queries)
    )
    chunks = -(-num_queries // rows)
    plan = gpu_select.Plan(1, rows, topk, as_bits, interpret)

    def chunk(_: None, i: Array) -> tuple[None, Array]:
        start = jnp.stack([i // chunks, i % chunks * rows])
        return None, gpu_select.select(q, k, w, lo, hi, start, None, plan)

    _, out = lax.scan(chunk, None, jnp.arange(batch * chunks, dtype=jnp.int32))
    return out.reshape(batch, chunks * rows, -1)[:, :num_queries]


def _chunk_rows(num_queries: int, num_keys: int, block: int) -> int:
    """Returns the queries per chunk: whole blocks, which divide T evenly if possible.

    An uneven last chunk costs a copy of the lists, to cut off its end.
    """
    most = max(CHUNK_BYTES // (4 * num_keys) // block, 1)
    blocks = -(-num_queries // block)
    fewest = -(-most // 2)
    even = [n for n in range(fewest, most + 1) if num_queries % (n * block) == 0]
    return min(even[-1] if even else most, blocks) * block
