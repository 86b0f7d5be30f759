"""The indexer's loss over lists on TPUs: DMA fetches listed rows, one copy per row.

A row of k_index is stored before the row of kv, so that one copy fetches both. VMEM
keeps a list's head-averaged probabilities, indexer scores and rows of k_index until the
softmax over the whole list is known; then dI = softmax(I) - p, and no row is fetched
twice. Rows of dk (float32 in HBM) are read while scores are computed, increased and
written back. A list holds a row once, and a query's rows are read after the previous
query's were written, so that sums have one order. Issuing copies limits the kernel
(static count on v5p: 9 of 10 bundles with a gradient). Not timed.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import cost, dispatch, mapped
from pallas_kernels.indexer_kl import gradient as gradient_lib
from pallas_kernels.sparse_mla import tpu_rows

HIDDEN = -1e30  # score of padding


def sparse_indexer_kl_loss(
    main: tuple,
    index: tuple,
    indices: Array,
    weight: Array,
    scale: float,
    *,
    interpret: bool = False,
) -> Float[Array, ""]:
    """See `pallas_kernels.sparse_indexer_kl_loss`; lists have -1 only at the end."""
    return _loss(index, main, (indices, weight), scale, interpret)


def unsupported_sparse_indexer_kl_loss(
    main: tuple, index: tuple, indices: Array, weight: Array, scale: float
) -> str | None:
    """Returns why shapes or dtypes cannot be taken."""
    del indices, weight, scale
    (q, kv, _), (q_index, k_index, _) = main, index
    dtypes = {x.dtype for x in (q, kv, q_index, k_index)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        names = sorted(x.name for x in dtypes)
        return f"q and k, also the indexer's, must share bf16 or f32, got {names}."
    dim, width = k_index.shape[2], kv.shape[2]
    layout = tpu_rows.Layout(kv.shape[1], dim + width, kv.dtype)
    if dim % tpu_rows.LANES or dim > layout.words:
        return (
            f"the indexer's dim must be a multiple of {tpu_rows.LANES} and at most "
            f"{layout.words} beside {width} of kv, got {dim}."
        )
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _loss(index, main, rows, scale, interpret):
    return jnp.sum(_call(index, main, rows, scale, interpret, with_gradient=False)[0])


def _forward(index, main, rows, scale, interpret):
    q, k, w = index
    loss, sums = _call(index, main, rows, scale, interpret, with_gradient=True)
    dq, dw, dk = sums
    dq, dw = (x[:, : q.shape[1]] for x in (dq, dw))
    dk = jnp.sum(dk, axis=0).reshape(-1, k.shape[2])[1:].reshape(k.shape)
    gradient = (dq, dk.astype(k.dtype), dw.astype(w.dtype))
    return dispatch.saved((jnp.sum(loss), gradient))


def _backward(scale, interpret, gradient, factor):
    del scale, interpret
    return gradient_lib.times(factor, gradient), None, None


_loss.defvjp(_forward, _backward)


def _call(
    index: tuple,
    main: tuple,
    rows: tuple,
    scale: float,
    interpret: bool,
    with_gradient: bool,
) -> tuple:
    """Computes the loss [B, t, 1]; on request, gradients of q, w and rows of k."""
    (q, kv, lse), (q_index, k_index, w), (indices, weight) = main, index, rows
    exact = lambda x: x.astype(jnp.float32)
    queries = (q, lse.swapaxes(1, 2), q_index, exact(w), exact(weight)[..., None])
    queries = tuple(tpu_rows.pad_queries(x) for x in queries)
    indices = tpu_rows.pad_list(indices)
    packed = jnp.concatenate([k_index, kv], axis=-1)
    layout = tpu_rows.Layout.of(packed)
    chunk = tpu_rows.chunk_size(indices.shape[2])
    chunks = indices.shape[2] // chunk
    tiles = indices.shape[1] // tpu_rows.QUERIES
    parts = tpu_rows.num_parts(indices.shape[1])
    of_part = functools.partial(tpu_rows.tile_of_part, tiles // parts)
    hbm, out_shape, out_specs, scratch, aliases = (layout.pack(packed),), (), (), (), {}
    if with_gradient:
        zeros, scratch = _sums(k_index, parts, chunks, chunk, q_index.shape[2])
        hbm += (zeros,)
        aliases = {7: 3}  # dk starts as zeros
        out_shape = tuple(_like(x) for x in (*queries[2:4], zeros))
        out_specs = (*(of_part(*x.shape[2:]) for x in out_shape[:2]), _anywhere())
    main_work, index_work = (math.prod(x.shape[2:]) for x in (q, q_index))
    work = main_work + index_work * (3 if with_gradient else 1)
    fetched = cost.rows(packed, indices.size)
    return mapped.pallas_call(
        functools.partial(_kernel, scale=scale, layout=layout),
        cost_estimate=cost.estimate(
            2 * indices.size * work, indices, queries, fetched, out_shape
        ),
        grid=(parts, len(q), tiles // parts),
        in_specs=[
            of_part(indices.shape[2], memory_space=pltpu.SMEM),
            tuple(of_part(*x.shape[2:]) for x in queries),
            tuple(_anywhere() for _ in hbm),
        ],
        out_specs=(of_part(1), out_specs),
        out_shape=(_like(queries[4]), out_shape),
        input_output_aliases=aliases,
        scratch_shapes=[
            (
                pltpu.VMEM((2, chunk * layout.lines, tpu_rows.LANES), hbm[0].dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ),
            tuple(pltpu.VMEM((chunks, chunk), jnp.float32) for _ in range(2)),
            scratch,
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="sparse_indexer_kl_loss",
    )(indices, queries, hbm)


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _anywhere() -> pl.BlockSpec:
    return pl.BlockSpec(memory_space=pl.ANY)


def _sums(
    k_index: Array, parts: int, chunks: int, chunk: int, heads: int
) -> tuple[Array, tuple]:
    """Returns zeros for rows of dk, and a query's scratch for its gradient."""
    num_keys, dim = k_index.shape[1:]
    rows = tpu_rows.Layout(num_keys, dim, jnp.dtype(jnp.float32))
    num_rows = 1 + len(k_index) * num_keys
    zeros = jnp.zeros((parts, num_rows * rows.lines, tpu_rows.LANES), jnp.float32)
    return zeros, (
        pltpu.VMEM((chunks, heads, chunk), jnp.float32),
        pltpu.VMEM((chunks, chunk, dim), k_index.dtype),
        pltpu.VMEM((chunks, chunk * rows.lines, tpu_rows.LANES), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),
    )


def _kernel(
    indices: Any,
    queries: tuple,
    hbm: tuple,
    loss: Any,
    gradient: tuple,
    fetch: tuple,
    kept: tuple,
    scratch: tuple,
    *,
    scale: float,
    layout: tpu_rows.Layout,
):
    """Processes QUERIES queries; `gradient` and `scratch` may be empty.

    `kept` holds a query's probabilities and indexer scores, [chunks, chunk].
    """
    first_row = 1 + pl.program_id(1) * layout.num_keys
    (fetched, fetching), (targets, scores) = fetch, kept
    chunk = fetched.shape[1] // layout.lines
    sums = _Gradient(indices, first_row, *gradient, *scratch) if gradient else None

    def compute(query, first, count, words):
        j, row = first // chunk, pl.ds(first // chunk, 1)
        if sums is not None:
            sums.start(query, j)
        q, lse, q_index, w, weight = (x[pl.ds(query, 1)] for x in queries)
        k, planes = _cut(layout.unpack(words()), q_index.shape[2])
        targets[row] = _target(q[0], tpu_rows.column(lse), planes, scale)
        w = tpu_rows.column(w)
        dots = jnp.maximum(tpu_rows.dot(q_index[0], k, 1, 1), 0)
        scores[row] = jnp.sum(dots * w, axis=0, keepdims=True)
        if sums is not None:
            sums.dots[j], sums.k_rows[j] = dots, k

        @pl.when(first + chunk >= count)
        def _():
            divergence, d_scores = _compare(targets[...], scores[...], count)
            loss[pl.ds(query, 1)] = divergence * weight
            if sums is not None:
                scores[...] = d_scores * weight
                sums.add(query, j + 1, q_index[0], w, scores)

    tpu_rows.over_chunks(
        indices, hbm[0], first_row, fetched, fetching, compute, layout.lines
    )
    if sums is not None:
        sums.wait_written(indices.shape[0] - 1)


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The inputs of a query's gradient, for its whole list at once.

    Padding uses the row before the sequence, which is no key's, and adds zeros to it.
    """

    indices: Any  # [queries, K] in SMEM
    first_row: Any  # row of index 0
    dq: Any  # [queries, I, J]
    dw: Any  # [queries, I]
    dk_parts: Any  # rows in HBM
    dots: Any  # ReLU(q . k) [chunks, I, chunk]
    k_rows: Any  # [chunks, chunk, J]
    buffer: Any  # rows of dk [chunks, chunk * lines, 128] in VMEM
    copying: Any  # semaphores of reads and of writes

    @property
    def dk(self):
        """Returns the rows to which this part of the queries adds."""
        return self.dk_parts.at[pl.program_id(0)]

    def start(self, query, j):
        """Starts reading a chunk's rows of dk."""

        @pl.when((j == 0) & (query > 0))
        def _():
            self.wait_written(query - 1)

        def copy(row, buffer):
            pltpu.make_async_copy(row, buffer, self.copying.at[0]).start()

        self._for_rows(query, j, copy)

    def add(self, query, chunks, q, w, d_scores):
        """Adds a query's chunks to rows of dk, starts writing them; writes dq, dw."""

        def write(row, buffer):
            pltpu.make_async_copy(buffer, row, self.copying.at[1]).start()

        def chunk(j, sums):
            dots, d_row = self.dots[j], d_scores[pl.ds(j, 1)]
            d_dots = jnp.where(dots > 0, d_row * w, 0).astype(q.dtype)
            tpu_rows.add_to(self.buffer.at[j], 0, tpu_rows.dot(d_dots, q, 0, 0))
            self._for_rows(query, j, write)
            dq, dw = sums
            dw += jnp.sum(dots * d_row, axis=1, keepdims=True)
            return dq + tpu_rows.dot(d_dots, self.k_rows[j], 1, 0), dw

        self._wait(query, self.copying.at[0])  # for all: their order is unknown
        zeros = jnp.zeros(q.shape, jnp.float32)
        dq, dw = lax.fori_loop(0, chunks, chunk, (zeros, zeros[:, :1]))
        self.dq[pl.ds(query, 1)] = dq.astype(q.dtype)[None]
        dw = jnp.broadcast_to(dw, (len(q), tpu_rows.LANES)).T[:1]
        self.dw[pl.ds(query, 1)] = dw

    def wait_written(self, query):
        """Waits until all of a query's rows of dk are in HBM."""
        self._wait(query, self.copying.at[1])

    @property
    def _chunk(self):
        return self.indices.shape[1] // self.buffer.shape[0]

    def _for_rows(self, query, j, copy):
        """Calls `copy(row, buffer)` for the rows of a chunk."""
        lines = self.buffer.shape[1] // self._chunk

        def start(i, index):
            row = tpu_rows.line(self.dk, self.first_row + index, lines)
            copy(row, tpu_rows.line(self.buffer.at[j], i, lines))

        first = j * self._chunk
        tpu_rows.for_listed(self.indices, query, first, self._chunk, start)

    def _wait(self, query, semaphore):
        """Waits for the copies of all chunks of a query."""
        count = tpu_rows.num_listed(self.indices, query)
        chunks = jnp.maximum((count + self._chunk - 1) // self._chunk, 1)
        wait = lambda j, _: tpu_rows.wait_for(self.buffer.at[j], semaphore)
        lax.fori_loop(0, chunks, wait, None)


def _cut(planes, dim):
    """Returns rows of k_index [n, dim], and the planes of the kv rows after them."""
    return planes[0][:, :dim], (planes[0][:, dim:], *planes[1:])


def _target(q, lse, planes, scale):
    """Computes head-averaged probabilities of a chunk: [1, chunk]; not masked."""
    parts, at = [], 0
    for plane in planes:
        parts.append(q[:, at : at + plane.shape[1]])
        at += plane.shape[1]
    probs = jnp.exp(tpu_rows.product(parts, planes) * scale - lse)
    return jnp.sum(probs, axis=0, keepdims=True) / len(q)


def _compare(targets, scores, count):
    """Computes KL(p || softmax(I)) [1, 1] and its gradient for I [chunks, chunk]."""
    j, i = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
    keep = j * scores.shape[1] + i < count
    targets = jnp.where(keep, targets, 0)
    scores = jnp.where(keep, scores, HIDDEN)
    top = jnp.max(scores, keepdims=True)
    norm = top + jnp.log(jnp.sum(jnp.exp(scores - top), keepdims=True))
    log_ratio = jnp.log(jnp.maximum(targets, 1e-30)) - (scores - norm)
    divergence = jnp.sum(jnp.where(keep, targets * log_ratio, 0), keepdims=True)
    probs = jnp.where(keep, jnp.exp(scores - norm), 0)
    total = jnp.sum(targets, keepdims=True)  # 1, or 0 without keys
    return divergence, probs * total - targets
