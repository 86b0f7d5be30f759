"""Top-k cached keys on GPUs: the kernels of `indexer_topk`, reading pages.

All multiprocessors share the scoring of a row of keys, whatever its length. Where rows
are long and few, several programs then select from each (`gpu_parts`), else one.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import eight_bits
from pallas_kernels.decode import gpu_parts
from pallas_kernels.indexer_topk import gpu_select


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
    """Returns why the kernels cannot take these arguments, or None."""
    del lo, hi
    pages = 1 if page_table is None else page_table.shape[1]
    has_codes = exponents is not None
    k = eight_bits.of_bytes(k)
    return gpu_select.unsupported(q, k, w, k.shape[1] * pages, topk, has_codes)


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
    batch, num_queries = q.shape[:2]
    num_keys = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    plan = gpu_select.Plan(batch, num_queries, topk, interpret=interpret)
    start = jnp.zeros(2, jnp.int32)
    args = (q, eight_bits.of_bytes(k), w, lo, hi, start, page_table)
    if gpu_parts.is_worthwhile(batch * num_queries, num_keys, topk):
        group = gpu_parts.group_size(num_keys, topk)
        plan = dataclasses.replace(plan, group=group)
        scores, maxima = gpu_select.scored(*args, plan, exponents)
        lists = gpu_parts.chosen(scores, maxima, lo, hi, num_keys, topk, interpret)
    else:
        lists = gpu_select.select(*args, plan, exponents)
    return lists.reshape(batch, num_queries, topk)
