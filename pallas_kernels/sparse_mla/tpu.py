"""DMA fetches rows into VMEM, one copy per row; a query's heads share them.

The TensorCore issues the copies of a chunk of rows, then computes the previous chunk.
Issuing copies limits the kernel: on v5p 4760 bundles for 1024 rows, but 1400 to compute
(not timed). XLA packs the rows first (see `tpu_rows`), with 3 KB of memory for each.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import cost, dispatch, mapped
from pallas_kernels.sparse_mla import tpu_backward, tpu_rows

HIDDEN = -1e30  # score of padding


def sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "B S row"],
    indices: Int[Array, "B T K"],
    scale: float,
    value_dim: int,
    deterministic: bool,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.sparse_mla`; sums rows on one core, always in one order."""
    del deterministic
    return _attend(q, kv, indices, scale, value_dim, interpret)


def unsupported_sparse_mla(
    q: Array,
    kv: Array,
    indices: Array,
    scale: float,
    value_dim: int,
    deterministic: bool,
) -> str | None:
    """Returns why shapes or dtypes cannot be taken."""
    del indices, scale, deterministic
    if value_dim % tpu_rows.LANES:
        return f"value_dim must be a multiple of {tpu_rows.LANES}, got {value_dim}"
    if q.dtype not in (jnp.bfloat16, jnp.float32) or kv.dtype not in (
        q.dtype,
        jnp.float32,
    ):
        return f"q and kv must be bfloat16 or float32, got {q.dtype}, {kv.dtype}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(
    q: Array, kv: Array, indices: Array, scale: float, value_dim: int, interpret: bool
) -> tuple:
    num_queries, kv = q.shape[1], kv.astype(q.dtype)
    layout = tpu_rows.Layout.of(kv)
    q, indices = tpu_rows.pad_queries(q), tpu_rows.pad_list(indices)
    out, lse = _call(q, layout.pack(kv), indices, layout, scale, value_dim, interpret)
    return out[:, :num_queries], lse[:, :num_queries].swapaxes(1, 2)


def _forward(q, kv, indices, scale, value_dim, interpret):
    out, lse = dispatch.saved(_attend(q, kv, indices, scale, value_dim, interpret))
    return (out, lse), (q, kv, indices, out, lse)


def _backward(
    scale: float,
    value_dim: int,
    interpret: bool,
    residuals: tuple,
    cotangents: tuple,
):
    del value_dim
    q, kv, indices, out, lse = residuals
    d_out, d_lse = cotangents
    lse, d_lse = lse.swapaxes(1, 2), d_lse.swapaxes(1, 2)
    shift = jnp.sum(out * d_out, axis=-1, dtype=jnp.float32) - d_lse
    rows = (lse, shift, d_out.astype(q.dtype))
    dq, dkv = tpu_backward.gradients(q, kv, indices, rows, scale, interpret)
    return dq, dkv, None


_attend.defvjp(_forward, _backward)


def _call(
    q: Float[Array, "B T N row"],
    rows: Array,
    indices: Int[Array, "B T K"],
    layout: tpu_rows.Layout,
    scale: float,
    value_dim: int,
    interpret: bool,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """Attends to packed rows; T and K are padded."""
    batch, num_queries, heads, width = q.shape
    chunk = tpu_rows.chunk_size(indices.shape[-1])
    tile = tpu_rows.tile
    pairs = batch * num_queries * indices.shape[-1]
    return mapped.pallas_call(
        functools.partial(_kernel, scale=scale, layout=layout),
        grid=(batch, num_queries // tpu_rows.QUERIES),
        in_specs=[
            tile(indices.shape[-1], memory_space=pltpu.SMEM),
            tile(heads, width),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=[tile(heads, value_dim), tile(heads)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, num_queries, heads, value_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, num_queries, heads), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, chunk * layout.lines, tpu_rows.LANES), rows.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            softmax_state(heads, value_dim),
        ],
        cost_estimate=cost.estimate(
            2 * pairs * heads * (width + value_dim),
            q,
            indices,
            cost.rows(q, pairs),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="sparse_mla",
    )(indices, q, rows)


def _kernel(
    indices: Any,
    q: Any,
    rows: Any,
    out: Any,
    lse: Any,
    fetched: Any,
    fetching: Any,
    state: tuple,
    *,
    scale: float,
    layout: tpu_rows.Layout,
):
    """Processes QUERIES queries, chunk by chunk of rows."""
    first_row = 1 + pl.program_id(0) * layout.num_keys
    chunk = fetched.shape[1] // layout.lines

    def compute(query, first, count, words):
        @pl.when(first == 0)
        def _():
            reset(state)

        planes = layout.unpack(words())
        is_key = lax.broadcasted_iota(jnp.int32, (1, chunk), 1) < count - first
        add_chunk(layout.cut(q[pl.ds(query, 1)][0]), planes, is_key, state, scale)

        @pl.when(first + chunk >= count)
        def _():
            total, sums = result(state)
            out[pl.ds(query, 1)] = total.astype(out.dtype)[None]
            lse[pl.ds(query, 1)] = sums

    tpu_rows.over_chunks(
        indices, rows, first_row, fetched, fetching, compute, layout.lines
    )


def softmax_state(heads: int, value_dim: int) -> tuple:
    """Returns the scratch of a running softmax: maximum, sum, weighted sum of rows."""
    column = pltpu.VMEM((heads, tpu_rows.LANES), jnp.float32)
    return column, column, pltpu.VMEM((heads, value_dim), jnp.float32)


def reset(state):
    """Resets the running softmax before the first chunk."""
    top, norm, total = state
    top[...] = jnp.full_like(top, HIDDEN)
    norm[...] = jnp.zeros_like(norm)
    total[...] = jnp.zeros_like(total)


def add_chunk(q, planes, is_key, state, scale):
    """Adds the rows that `is_key` [1, chunk] marks to the running softmax.

    Args:
      q: [N, W] parts of the queries.
      planes: [chunk, W] parts of the rows.
      is_key: which rows count.
      state: see `softmax_state`.
      scale: factor on scores.
    """
    top, norm, total = state
    scores = jnp.where(is_key, tpu_rows.product(q, planes) * scale, HIDDEN)
    before = top[:, :1]
    now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    shrink = jnp.exp(before - now)
    weights = jnp.where(is_key, jnp.exp(scores - now), 0)
    added = jnp.sum(weights, axis=1, keepdims=True)
    top[...] = jnp.broadcast_to(now, top.shape)
    norm[...] = norm[...] * shrink + added
    weights, at = weights.astype(planes[0].dtype), 0
    for plane in planes:
        size = min(plane.shape[1], total.shape[1] - at)
        if size > 0:
            part = slice(at, at + size)
            values = tpu_rows.dot(weights, plane[:, :size], 1, 0)
            total[:, part] = total[:, part] * shrink + values
        at += size


def result(state):
    """Returns output [N, C] and log-sum-exp [1, N], zeros without keys."""
    top, norm, total = state
    has_keys = norm[...] > 0
    divisor = jnp.where(has_keys, norm[...], 1)
    sums = jnp.where(has_keys, top[...] + jnp.log(divisor), 0)
    return total[...] / divisor[:, :1], sums.T[:1]
