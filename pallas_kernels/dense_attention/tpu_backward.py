"""Gradients of attention on TPUs: probabilities recomputed from the log-sum-exp.

Two kernels sum in VMEM in a fixed order: dq over the keys of a query block, dk and dv
over the queries of a key block. The second kernel uses scores keys x queries, so that
no product needs a transposed operand.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import block_pairs, cost
from pallas_kernels.dense_attention import tpu_blocks as blocks


def gradients(
    inputs: tuple,
    d_out: Float[Array, "B N t O"],
    statistics: Float[Array, "B N 2 t"],
    rows: tuple[int, int],
    static: tuple[float, int, bool],
) -> tuple:
    """Gradients of q, k, v, and None for bounds and bits.

    Args:
      inputs: q [B, N, t, H], k [B, N, s, H], v [B, N, s, O], bounds [B, 2, t], and
        bits [B, t, W] or None; in whole blocks.
      d_out: gradient of the output.
      statistics: log-sum-exp, and sum(out * d_out) minus the log-sum-exp's gradient.
      rows: rows of a query block and of a key block.
      static: the scale, S - T and interpret.
    """
    q, k, v, bounds, bits = inputs
    keys = k.astype(q.dtype), v.astype(q.dtype)
    arrays = (q, *keys, bounds if bits is None else bits, d_out, statistics)
    lists = functools.partial(
        block_pairs.make, bounds[:, 0], bounds[:, 1], k.shape[2], rows, static[1]
    )
    (dq,) = _call(_dq_kernel, lists(major="queries"), arrays, (q,), rows, static)
    dk, dv = _call(_dkv_kernel, lists(major="keys"), arrays, (k, v), rows, static)
    return dq, dk, dv, None, None


def _call(kernel, pairs, arrays, like, rows, static):
    """Runs a kernel whose outputs are blocks of queries (one) or of keys (two)."""
    q, _, v, mask, *_ = arrays
    specs = blocks.Specs(pairs.size, rows)
    is_queries = len(like) == 1
    spec = specs.queries if is_queries else specs.keys
    size = rows[0] if is_queries else rows[1]
    (batch, heads, num_queries, dim), out_dim = q.shape, v.shape[3]
    work = 2 * batch * heads * cost.seen_pairs(num_queries, v.shape[2])
    work *= 2 * dim + out_dim if is_queries else 2 * (dim + out_dim)
    return pl.pallas_call(
        functools.partial(kernel, scale=static[0], size=pairs.size),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*q.shape[:2], pairs.steps),
            in_specs=[
                specs.queries(q.shape[3]),
                specs.keys(q.shape[3]),
                specs.keys(v.shape[3]),
                specs.mask(mask.dtype == jnp.uint32),
                specs.queries(v.shape[3]),
                specs.statistics(2),
            ],
            out_specs=[spec(x.shape[3]) for x in like],
            scratch_shapes=[pltpu.VMEM((size, x.shape[3]), jnp.float32) for x in like],
        ),
        cost_estimate=cost.estimate(work, arrays, like),
        compiler_params=blocks.parameters(),
        interpret=static[2],
        name="dense_attention_backward",
    )(pairs.flat, *arrays)


def _visit(pairs: Any, size: int, mask_ref: Any, sums: tuple, add: Any) -> None:
    """Clears the sums at the first pair of a major block, and adds each pair.

    `add(pair, is_whole)` adds a pair; if every query sees every key, without a mask.
    """
    pair = pairs[pl.program_id(0) * size + pl.program_id(2)]

    @pl.when(block_pairs.has(pair, block_pairs.FIRST))
    def _() -> None:
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    is_whole = block_pairs.has(pair, block_pairs.WHOLE)
    is_whole &= mask_ref.dtype != jnp.uint32
    pl.when(is_whole)(functools.partial(add, pair, is_whole=True))
    pl.when(block_pairs.is_pair(pair) & ~is_whole)(
        functools.partial(add, pair, is_whole=False)
    )


def _at_last(pairs: Any, size: int) -> Any:
    """Decorates a function to run at the last pair of a major block."""
    pair = pairs[pl.program_id(0) * size + pl.program_id(2)]
    return pl.when(block_pairs.has(pair, block_pairs.LAST))


def _dq_kernel(pairs: Any, *refs: Any, scale: float, size: int) -> None:
    """Adds up dq = scale sum over s of dS k, dS = P (dP - shift), [queries, keys]."""
    q_ref, k_ref, v_ref, mask_ref, d_out_ref, row_ref, dq_ref, sum_ref = refs
    keys = k_ref.shape[2]

    def add(pair: Array, is_whole: bool) -> None:
        k = k_ref[0, 0]
        lse, shift = (
            blocks.wide(blocks.column(row_ref[0, 0, n : n + 1]), keys) for n in (0, 1)
        )
        scores = blocks.contract(q_ref[0, 0], k, (1, 1)) * scale
        if not is_whole:
            keep = blocks.keep(mask_ref, pair, keys, key_axis=1)
            scores = jnp.where(keep, scores, blocks.HIDDEN)
        probs = jnp.exp(scores - lse)
        d_probs = blocks.contract(d_out_ref[0, 0], v_ref[0, 0], (1, 1))
        d_scores = (probs * (d_probs - shift)).astype(k.dtype)
        sum_ref[...] += blocks.contract(d_scores, k, (1, 0))

    _visit(pairs, size, mask_ref, (sum_ref,), add)

    @_at_last(pairs, size)
    def _() -> None:
        dq_ref[0, 0] = (sum_ref[...] * scale).astype(dq_ref.dtype)


def _dkv_kernel(pairs: Any, *refs: Any, scale: float, size: int) -> None:
    """Adds up dk = scale sum over t of dS q, dv = sum of P d_out, [keys, queries]."""
    q_ref, k_ref, v_ref, mask_ref, d_out_ref, row_ref, dk_ref, dv_ref, *sums = refs
    dk_sum, dv_sum = sums

    def add(pair: Array, is_whole: bool) -> None:
        q, d_out = q_ref[0, 0], d_out_ref[0, 0]
        scores = blocks.contract(k_ref[0, 0], q, (1, 1)) * scale
        if not is_whole:
            keep = blocks.keep(mask_ref, pair, k_ref.shape[2], key_axis=0)
            scores = jnp.where(keep, scores, blocks.HIDDEN)
        probs = jnp.exp(scores - row_ref[0, 0, 0:1])
        dv_sum[...] += blocks.contract(probs.astype(d_out.dtype), d_out, (1, 0))
        d_probs = blocks.contract(v_ref[0, 0], d_out, (1, 1))
        d_scores = (probs * (d_probs - row_ref[0, 0, 1:2])).astype(q.dtype)
        dk_sum[...] += blocks.contract(d_scores, q, (1, 0))

    _visit(pairs, size, mask_ref, tuple(sums), add)

    @_at_last(pairs, size)
    def _() -> None:
        dk_ref[0, 0] = (dk_sum[...] * scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_sum[...].astype(dv_ref.dtype)
