"""Attention to listed cached rows on TPU, without a copy of the cache.

The cache must be stored row by row. XLA transposes an argument that is 576 wide to save
padding, and each step would transpose it back. To avoid this, give q and the cache 640
entries, the last 64 zero, or pin the layout.

A DMA cannot fetch a single row of a tile. It fetches the 8 rows around each listed row,
10 KB, and the kernel masks 7 of them. If the queries cannot be divided evenly among a
chip's cores, each core takes a part of every list.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, cost, mapped
from pallas_kernels.sparse_mla import tpu as attention
from pallas_kernels.sparse_mla import tpu_rows

GROUP = 8  # rows of a tile


def decode_sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "P s row"],
    indices: Int[Array, "B T K"],
    page_table: Int[Array, "B n"] | None,
    scale: float,
    value_dim: int,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.decode_sparse_mla`."""
    batch, num_queries, heads, width = q.shape
    chunk, cores = block_sizes.tpu().decode_groups, block_sizes.tpu().cores
    parts = cores if batch * num_queries % cores else 1  # per list
    missing = -indices.shape[-1] % (chunk * parts)
    indices = jnp.pad(indices, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
    rows = _rows(indices, kv.shape[1], page_table)
    rows = rows.reshape(-1, 1, indices.shape[-1] // parts)
    groups, is_row = _groups(rows, chunk)
    one = lambda *sizes, **space: pl.BlockSpec(
        (None, *sizes), lambda i: (i, *[0] * len(sizes)), **space
    )
    count = len(groups)
    out, lse = mapped.pallas_call(
        functools.partial(_kernel, scale=scale),
        grid=(count,),
        in_specs=[
            one(1, groups.shape[-1], memory_space=pltpu.SMEM),
            one(1, groups.shape[-1] * GROUP),
            pl.BlockSpec((None, heads, width), lambda i: (i // parts, 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[one(heads, value_dim), one(1, heads)],
        out_shape=[
            jax.ShapeDtypeStruct(
                (count, heads, value_dim), q.dtype if parts == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((count, 1, heads), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, chunk, GROUP, width), kv.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            attention.softmax_state(heads, value_dim),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
        cost_estimate=_cost(groups.size * GROUP, q, kv, value_dim),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="decode_sparse_mla",
    )(groups, is_row, q.reshape(-1, heads, width), kv.reshape(-1, GROUP, width))
    if parts > 1:
        has_rows = jnp.any(is_row, axis=-1, keepdims=True)
        out, lse = _combined(out, lse, has_rows, parts)
    out = out.reshape(batch, num_queries, heads, value_dim).astype(q.dtype)
    return out, lse.reshape(batch, num_queries, heads).swapaxes(1, 2)


def _groups(
    rows: Int[Array, "parts 1 fetched"], chunk: int
) -> tuple[Int[Array, "parts 1 fetched"], Float[Array, "parts 1 8*fetched"]]:
    """Returns the groups to fetch, -1 after a list's end, and marks of listed rows."""
    is_listed = rows >= 0
    is_row = rows[..., None] % GROUP == jnp.arange(GROUP)[None, None, None]
    is_row = (is_row & is_listed[..., None]).astype(jnp.float32)
    # The last chunk is fetched whole; its padding may be any rows.
    chunks = -(-jnp.sum(is_listed, axis=-1, keepdims=True) // chunk)
    slots = jnp.arange(rows.shape[-1])[None, None]
    padding = jnp.where(slots < jnp.maximum(chunks, 1) * chunk, 0, -1)
    return jnp.where(is_listed, rows // GROUP, padding), is_row.reshape(
        len(rows), 1, -1
    )


def _combined(
    out: Float[Array, "parts N C"],
    lse: Float[Array, "parts 1 N"],
    has_rows: Array,
    parts: int,
) -> tuple[Float[Array, "lists N C"], Float[Array, "lists N"]]:
    """Combines the softmax over parts of lists; an empty list gives zeros."""
    of_list = lambda x: x.reshape(-1, parts, *x.shape[1:])
    lse = of_list(jnp.where(has_rows, lse, -jnp.inf)[:, 0])
    top = jnp.max(lse, axis=1, keepdims=True)
    weight = jnp.where(lse > -jnp.inf, jnp.exp(lse - top), 0)
    total = jnp.sum(weight, axis=1)
    safe = jnp.where(total > 0, total, 1)
    out = jnp.sum(of_list(out) * weight[..., None], axis=1) / safe[..., None]
    return out, jnp.where(total > 0, top[:, 0] + jnp.log(safe), 0)


def unsupported_decode_sparse_mla(
    q: Array,
    kv: Array,
    indices: Array,
    page_table: Array | None,
    scale: float,
    value_dim: int,
) -> str | None:
    """Returns why shapes or dtypes cannot be taken."""
    del indices, page_table
    if kv.shape[1] % GROUP:
        return f"pages must be multiples of {GROUP} tokens, got {kv.shape[1]}"
    return attention.unsupported_sparse_mla(q, kv, kv, scale, value_dim, True)


def _cost(keys: int, q: Array, kv: Array, value_dim: int) -> pl.CostEstimate:
    """Estimates the cost of all fetched rows, including those not listed."""
    heads, width = q.shape[2:]
    work = 2 * keys * heads * (width + value_dim)
    return cost.estimate(work, cost.rows(kv, keys))


def _rows(
    indices: Int[Array, "B T K"], size: int, page_table: Int[Array, "B n"] | None
) -> Int[Array, "B T K"]:
    """Returns the rows that lists name in the joined pages of `size` rows each."""
    sequence = jnp.arange(len(indices))[:, None, None]
    num_keys = size * (1 if page_table is None else page_table.shape[1])
    is_key = (indices >= 0) & (indices < num_keys)
    position = jnp.where(is_key, indices, 0)
    if page_table is not None:
        page = page_table[sequence, position // size]
        rows = page * size + position % size
    else:
        rows = sequence * size + position
    return jnp.where(is_key, rows, -1)


def _kernel(
    groups: Any,
    is_row: Any,
    q: Any,
    kv: Any,
    out: Any,
    lse: Any,
    fetched: Any,
    fetching: Any,
    state: tuple,
    *,
    scale: float,
):
    """Processes one query, chunk by chunk of groups."""
    attention.reset(state)

    def compute(query, first, count, words):
        del query, count  # padding marks no row of its group
        keys = fetched.shape[1] * GROUP
        part = pl.ds(pl.multiple_of(first * GROUP, keys), keys)
        rows = words()[...].reshape(keys, fetched.shape[-1])
        attention.add_chunk((q[...],), (rows,), is_row[:, part] > 0, state, scale)

    tpu_rows.over_chunks(groups, kv, 0, fetched, fetching, compute)
    total, sums = attention.result(state)
    out[...] = total.astype(out.dtype)
    lse[...] = sums
