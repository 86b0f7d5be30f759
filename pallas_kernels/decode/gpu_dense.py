"""Top-k cached keys on GPUs: the kernels of `indexer_topk`, reading pages.

All multiprocessors share the scoring of a row of keys, whatever its length. A single
program then selects from the row. It reads S / G maxima and K G scores (128 KB at
S = 131072) instead of the whole row, so a further split would cost more in launches
than it saves.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.indexer_topk import gpu_select


def unsupported_decode_indexer_topk(
    q: Array,
    k: Array,
    w: Array,
    lo: Array,
    hi: Array,
    page_table: Array | None,
    topk: int,
) -> str | None:
    """Returns why the kernels cannot take these arguments, or None."""
    del lo, hi
    pages = 1 if page_table is None else page_table.shape[1]
    return gpu_select.unsupported(q, k, w, k.shape[1] * pages, topk)


def decode_indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "pages s J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    page_table: Int[Array, "B n"] | None,
    topk: int,
    *,
    interpret: bool = False,
) -> Int[Array, "B T K"]:
    """See `pallas_kernels.decode_indexer_topk`."""
    batch, num_queries = q.shape[:2]
    plan = gpu_select.Plan(batch, num_queries, topk, interpret=interpret)
    start = jnp.zeros(2, jnp.int32)
    lists = gpu_select.select(q, k, w, lo, hi, start, page_table, plan)
    return lists.reshape(batch, num_queries, topk)
