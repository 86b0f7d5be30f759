"""Attention to listed cached rows on TPU, without a copy of the cache.

The cache must be stored row by row. XLA transposes an argument that is 576 wide to save
padding, and each step would transpose it back. To avoid this, give q and the cache 640
entries, the last 64 zero, or pin the layout.

A DMA cannot fetch a single row of a tile. It fetches the 8 rows around each listed row,
10 KB, and the kernel masks 7 of them. A SparseCore can: where the chip has some, and
for rows of bytes, XLA gathers the listed rows, and the kernel fetches each once. If the
queries cannot be divided evenly among a chip's cores, each core takes a part of every
list.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8

from pallas_kernels import block_sizes, cost, latent_rows, mapped
from pallas_kernels.decode import reference, tpu_bytes
from pallas_kernels.sparse_mla import tpu as attention
from pallas_kernels.sparse_mla import tpu_rows

GROUP, BYTE_GROUP = 8, 32  # rows of a tile of floats, and of bytes


def decode_sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "P s row"] | UInt8[Array, "P s width"],
    indices: Int[Array, "B T K"],
    page_table: Int[Array, "B n"] | None,
    scale: float,
    value_dim: int,
    form: latent_rows.Form | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.decode_sparse_mla`; `form` is that of rows of bytes."""
    batch, num_queries, heads, _ = q.shape
    sizes = block_sizes.tpu()
    parts = sizes.cores if batch * num_queries % sizes.cores else 1  # per list
    if form is None and not sizes.decode_gathers:
        groups, is_row = _around(_rows(indices, kv.shape[1], page_table), parts)
        kv = kv.reshape(-1, GROUP, kv.shape[2])
    else:
        picked, is_key = reference.listed(kv, indices, page_table)
        kv, groups, is_row = _side_by_side(picked, is_key, parts)
        q = _padded(q, 3, tpu_rows.LANES)
    q = q.reshape(-1, *q.shape[2:])
    out, lse = _call(q, kv, groups, is_row, scale, value_dim, form, interpret)
    if parts > 1:
        has_rows = jnp.any(is_row, axis=-1, keepdims=True)
        out, lse = _combined(out, lse, has_rows, parts)
    out = out.reshape(batch, num_queries, heads, value_dim).astype(q.dtype)
    return out, lse.reshape(batch, num_queries, heads).swapaxes(1, 2)


def _call(
    q: Float[Array, "lists N row"],
    kv: Shaped[Array, "all group width"],
    groups: Int[Array, "parts 1 fetched"],
    is_row: Float[Array, "parts 1 group*fetched"],
    scale: float,
    value_dim: int,
    form: latent_rows.Form | None,
    interpret: bool,
) -> tuple[Float[Array, "parts N C"], Float[Array, "parts 1 N"]]:
    """Attends to the rows that are marked in groups, a part of a list at a time."""
    (lists, heads, _), (count, _, fetched) = q.shape, groups.shape
    (_, group, width), parts = kv.shape, count // lists
    places = () if form is None else (jnp.asarray(tpu_bytes.places(form, width)),)
    one = lambda *sizes, **space: pl.BlockSpec(
        (None, *sizes), lambda i: (i, *[0] * len(sizes)), **space
    )
    return mapped.pallas_call(
        functools.partial(_kernel, scale=scale, form=form),
        grid=(count,),
        in_specs=[
            one(1, fetched, memory_space=pltpu.SMEM),
            one(1, fetched * group),
            pl.BlockSpec((None, *q.shape[1:]), lambda i: (i // parts, 0, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
            *(pl.BlockSpec(x.shape, lambda i: (0, 0)) for x in places),
        ],
        out_specs=[one(heads, value_dim), one(1, heads)],
        out_shape=[
            jax.ShapeDtypeStruct(
                (count, heads, value_dim), q.dtype if parts == 1 else jnp.float32
            ),
            jax.ShapeDtypeStruct((count, 1, heads), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, _chunk(fetched, group), group, width), kv.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            attention.softmax_state(heads, value_dim),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), disable_bounds_checks=True
        ),
        cost_estimate=_cost(groups.size * group, q, kv, value_dim),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="decode_sparse_mla",
    )(groups, is_row, q, kv, *places)


def _around(
    rows: Int[Array, "B T K"], parts: int
) -> tuple[Int[Array, "parts 1 fetched"], Float[Array, "parts 1 8*fetched"]]:
    """Returns the group around each row, -1 after a list's end, and marks of rows."""
    rows = _padded(rows, 2, block_sizes.tpu().decode_groups * parts, -1)
    rows = rows.reshape(-1, 1, rows.shape[-1] // parts)
    is_listed = rows >= 0
    is_row = rows[..., None] % GROUP == jnp.arange(GROUP)[None, None, None]
    is_row = is_row & is_listed[..., None]
    groups = jnp.where(is_listed, rows // GROUP, 0)
    return _to_last_chunk(groups, is_row)


def _side_by_side(
    rows: Shaped[Array, "B T K row"], is_key: Bool[Array, "B T K"], parts: int
) -> tuple[
    Shaped[Array, "all group width"],
    Int[Array, "parts 1 fetched"],
    Float[Array, "parts 1 group*fetched"],
]:
    """Returns the groups of gathered rows, which to fetch, and marks of keys."""
    group = BYTE_GROUP if rows.dtype == jnp.uint8 else GROUP
    whole = tpu_rows.LANES * parts  # marks of a chunk are whole tiles
    most = block_sizes.tpu().decode_groups * GROUP // tpu_rows.LANES
    whole *= min(-(-rows.shape[2] // whole), most)
    rows = _padded(_padded(rows, 3, tpu_rows.LANES), 2, whole)
    is_row = _padded(is_key, 2, whole).reshape(-1, 1, rows.shape[2] // parts)
    is_row = is_row.reshape(*is_row.shape[:2], -1, group)
    groups = jnp.arange(is_row[..., 0].size).reshape(is_row.shape[:3])
    return rows.reshape(-1, group, rows.shape[3]), *_to_last_chunk(groups, is_row)


def _to_last_chunk(
    groups: Int[Array, "parts 1 fetched"], is_row: Bool[Array, "parts 1 fetched group"]
) -> tuple[Int[Array, "parts 1 fetched"], Float[Array, "parts 1 group*fetched"]]:
    """Cuts lists after the last chunk with a row; padding in it may be any rows."""
    fetched, group = is_row.shape[2:]
    chunk, slots = _chunk(fetched, group), jnp.arange(fetched)[None, None]
    ends = jnp.where(jnp.any(is_row, axis=-1), slots + 1, 1)
    chunks = -(-jnp.max(ends, axis=-1, keepdims=True) // chunk)
    groups = jnp.where(slots < chunks * chunk, groups, -1)
    return groups, is_row.reshape(len(groups), 1, -1).astype(jnp.float32)


def _chunk(fetched: int, group: int) -> int:
    """Returns the groups fetched at a time."""
    return min(block_sizes.tpu().decode_groups * GROUP // group, fetched)


def _padded(x: Array, axis: int, multiple: int, fill: int = 0) -> Array:
    """Pads an axis to a multiple."""
    widths = [(0, -n % multiple if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=fill) if widths[axis][1] else x


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
    form: latent_rows.Form | None = None,
) -> str | None:
    """Returns why shapes or dtypes cannot be taken."""
    del indices, page_table
    if form is not None:
        kv = q  # restored rows are of its type
        if (reason := tpu_bytes.unsupported(form)) is not None:
            return reason
    elif kv.shape[1] % GROUP:
        return f"pages must be multiples of {GROUP} tokens, got {kv.shape[1]}"
    return attention.unsupported_sparse_mla(q, kv, kv, scale, value_dim, True)


def _cost(keys: int, q: Array, kv: Array, value_dim: int) -> pl.CostEstimate:
    """Estimates the cost of all fetched rows, including those not listed."""
    heads, width = q.shape[1:]
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
    *refs: Any,
    scale: float,
    form: latent_rows.Form | None,
):
    """Processes one query, chunk by chunk of groups."""
    *places, out, lse, fetched, fetching, state = refs
    attention.reset(state)

    def compute(query, first, count, words):
        del query, count  # padding marks no row of its group
        _, chunk, group, width = fetched.shape
        part = pl.ds(pl.multiple_of(first * group, chunk * group), chunk * group)
        rows = words()[...].reshape(-1, width)
        of_q, planes = (q[...],), (rows,)
        if form is not None:
            of_q = (q[:, : form.latent], q[:, form.latent :])
            planes = tpu_bytes.restored(rows, places[0][...], form)
        attention.add_chunk(of_q, planes, is_row[:, part] > 0, state, scale)

    tpu_rows.over_chunks(groups, kv, 0, fetched, fetching, compute)
    total, sums = attention.result(state)
    out[...] = total.astype(out.dtype)
    lse[...] = sums
