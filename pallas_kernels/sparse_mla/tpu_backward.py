"""Gradients of `sparse_mla` on TPU: one kernel, which also sums those of kv.

If a chip has two cores, each takes half of the queries and has its own sums.

The kernel fetches a chunk's rows of kv as in the forward pass. It also fetches the rows
of their gradient (float32 in HBM), adds to them and writes them back, without XLA's
scatter. A list holds a row once, so copies in flight never overlap. A chunk is read
after the previous one was written, so that sums have one order.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import cost, mapped
from pallas_kernels.sparse_mla import tpu_rows


def gradients(
    q: Array,
    kv: Array,
    indices: Array,
    rows: tuple[Array, Array, Array],
    scale: float,
    interpret: bool,
) -> tuple[Array, Array]:
    """Gradients of q [B, T, N, row] and kv [B, S, row], arguments of `sparse_mla`.

    `rows` are the log-sum-exp [B, T, N], the shift sum(out * d_out) - d_lse [B, T, N]
    and the cotangent d_out [B, T, N, C].
    """
    num_queries, width = q.shape[1], kv.shape[-1]
    dtype, kv = kv.dtype, kv.astype(q.dtype)
    layout = tpu_rows.Layout.of(kv)
    queries = tuple(tpu_rows.pad_queries(x) for x in (q, *rows))
    indices = tpu_rows.pad_list(indices)
    heads, value_dim = queries[-1].shape[2:]
    words, parts = layout.pack(kv), tpu_rows.num_parts(indices.shape[1])
    steps = indices.shape[1] // tpu_rows.QUERIES // parts
    tile = functools.partial(tpu_rows.tile_of_part, steps)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    sums = tpu_rows.Layout(layout.num_keys, width, jnp.dtype(jnp.float32))
    num_rows = len(words) // layout.lines
    zeros = jnp.zeros((parts, num_rows * sums.lines, tpu_rows.LANES), jnp.float32)
    chunk = tpu_rows.chunk_size(indices.shape[-1])
    buffer = pltpu.VMEM((chunk * sums.lines, tpu_rows.LANES), jnp.float32)
    semaphores = pltpu.SemaphoreType.DMA((2,))
    work = 2 * indices.size * heads * (3 * width + 2 * value_dim)
    fetched = [cost.rows(kv, indices.size)] * 4
    dq, dkv = mapped.pallas_call(
        functools.partial(_kernel, scale=scale, layout=layout),
        grid=(parts, len(indices), steps),
        in_specs=[
            tile(indices.shape[-1], memory_space=pltpu.SMEM),
            (tile(heads, width), tile(heads), tile(heads), tile(heads, value_dim)),
            (anywhere, anywhere),
        ],
        out_specs=[tile(heads, width), anywhere],
        out_shape=[
            jax.ShapeDtypeStruct(queries[0].shape, q.dtype),
            jax.ShapeDtypeStruct(zeros.shape, zeros.dtype),
        ],
        input_output_aliases={6: 1},
        scratch_shapes=[
            pltpu.VMEM((2, chunk * layout.lines, tpu_rows.LANES), words.dtype),
            semaphores,
            (pltpu.VMEM((heads, width), jnp.float32), buffer, semaphores),
        ],
        cost_estimate=cost.estimate(work, queries, indices, fetched),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="sparse_mla_backward",
    )(indices, queries, (words, zeros))
    dkv = jnp.sum(dkv, axis=0).reshape(num_rows, -1)[1:, :width].astype(dtype)
    return dq[:, :num_queries], dkv.reshape(kv.shape)


def _kernel(
    indices,
    queries,
    rows,
    dq,
    dkv,
    fetched,
    fetching,
    sums,
    *,
    scale: float,
    layout: tpu_rows.Layout,
):
    """Processes QUERIES queries; `sums` are dq and the rows of dkv of a chunk."""
    first_row = 1 + pl.program_id(1) * layout.num_keys
    rows, _ = rows  # dkv starts as these zeros
    dkv = dkv.at[pl.program_id(0)]
    dq_sum, row_sums, adding = sums
    chunk = fetched.shape[1] // layout.lines
    lines = row_sums.shape[0] // chunk
    reading, writing = adding.at[0], adding.at[1]

    def row_of(index):
        # Padding adds zeros to the row before the sequence, which is no key's.
        return tpu_rows.line(dkv, first_row + index, lines)

    def read(i, index):
        buffer = tpu_rows.line(row_sums, i, lines)
        pltpu.make_async_copy(row_of(index), buffer, reading).start()

    def write(i, index):
        buffer = tpu_rows.line(row_sums, i, lines)
        pltpu.make_async_copy(buffer, row_of(index), writing).start()

    def compute(query, first, count, words):
        @pl.when((query > 0) | (first > 0))
        def _():
            tpu_rows.wait_for(row_sums, writing)

        tpu_rows.for_listed(indices, query, first, chunk, read)
        planes = layout.unpack(words())
        q, lse, shift, d_out = (x[pl.ds(query, 1)] for x in queries)
        x, dy = layout.cut(q[0]), layout.cut(d_out[0])
        columns = (tpu_rows.column(lse), tpu_rows.column(shift))
        is_key = lax.broadcasted_iota(jnp.int32, (1, chunk), 1) < count - first
        probs, d_scores = _chunk(x, dy, columns, planes, is_key, scale)
        tpu_rows.wait_for(row_sums, reading)
        _accumulate(x, dy, planes, (probs, d_scores), first == 0, dq_sum, row_sums)
        tpu_rows.for_listed(indices, query, first, chunk, write)

        @pl.when(first + chunk >= count)
        def _():
            dq[pl.ds(query, 1)] = dq_sum[...].astype(dq.dtype)[None]

    tpu_rows.over_chunks(
        indices, rows, first_row, fetched, fetching, compute, layout.lines
    )
    tpu_rows.wait_for(row_sums, writing)


def _chunk(x, dy, columns, planes, is_key, scale):
    """Computes probabilities and gradient of the scores, [N, chunk]."""
    lse, shift = columns
    values = [
        plane[:, : part.shape[1]] for part, plane in zip(dy, planes, strict=False)
    ]
    scores = tpu_rows.product(x, planes) * scale
    probs = jnp.where(is_key, jnp.exp(scores - lse), 0)
    d_scores = scale * probs * (tpu_rows.product(dy, values) - shift)
    return probs.astype(x[0].dtype), d_scores.astype(x[0].dtype)


def _accumulate(x, dy, planes, chunk, is_first, dq_sum, sums):
    """Adds a chunk's products to dq (the first one starts it) and to rows of dkv."""
    probs, d_scores = chunk
    at = 0
    for i, plane in enumerate(planes):
        part = slice(at, at + plane.shape[1])
        before = jnp.where(is_first, 0, dq_sum[:, part])
        dq_sum[:, part] = before + tpu_rows.dot(d_scores, plane, 1, 0)
        missing = -plane.shape[1] % tpu_rows.LANES
        whole = jnp.pad(x[i], ((0, 0), (0, missing)))
        tpu_rows.add_to(sums, at, tpu_rows.dot(d_scores, whole, 0, 0))
        if i < len(dy):
            tpu_rows.add_to(sums, at, tpu_rows.dot(probs, dy[i], 0, 0))
        at += plane.shape[1]
