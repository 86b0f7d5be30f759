"""The indexer's loss on TPUs: tiles of keys x queries, which never reach HBM.

One kernel computes the log-sum-exp of the indexer's scores. A second kernel sums the
attention's probabilities of a tile over heads, then adds the tile's share of the loss
and, on request, of the gradient: dI = softmax(I) - p is known by then. VMEM holds the
sums dq and dw of a block of queries; dk, which is small, is read from HBM and written
back for each tile, in a fixed order. So the attention's scores are computed only once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels import block_pairs, block_sizes, cost, dispatch, selection
from pallas_kernels.dense_attention import tiled
from pallas_kernels.dense_attention import tpu_blocks as blocks
from pallas_kernels.indexer_kl import gradient as gradient_lib

HEADS = 8  # attention heads per step: the fewest of a log-sum-exp block
LANES = selection.LANES


def unsupported_indexer_kl_loss(
    main: tuple,
    index: tuple,
    lo: Array,
    hi: Array,
    selected: Array | None,
    weight: Array,
    scale: float,
) -> str | None:
    """Returns why the kernels cannot take these shapes, or None."""
    del lo, hi, selected, weight, scale
    (q, k, _), (q_index, _, _) = main, index
    dims, heads = (q.shape[3], q_index.shape[3]), (q.shape[2], q_index.shape[2])
    if dims[0] % LANES or dims[1] % LANES:
        return f"head dims must be multiples of {LANES}, got {dims}."
    if heads[0] % HEADS or heads[1] % 8:
        return f"numbers of heads must be multiples of {HEADS} and 8, got {heads}."
    rows = _tile_rows(q, k.shape[1], axis=1)
    num_blocks = (-(-q.shape[1] // rows[0]), -(-k.shape[1] // rows[1]))
    offset = k.shape[1] - q.shape[1]
    parts = block_sizes.tpu().cores
    pairs = len(q) * parts * block_pairs.size(num_blocks, rows, offset)
    if pairs > block_pairs.MAX_PAIRS:
        return f"{pairs} pairs of blocks do not fit scalar memory; split the batch."
    return None


def indexer_kl_loss(
    main: tuple,
    index: tuple,
    lo: Array,
    hi: Array,
    selected: Array | None,
    weight: Array,
    scale: float,
    *,
    interpret: bool = False,
) -> Float[Array, ""]:
    """See `pallas_kernels.indexer_kl_loss`."""
    (q, k, lse), (q_index, k_index, w) = main, index
    num_queries, num_keys = q.shape[1], k.shape[1]
    rows = _tile_rows(q, num_keys, axis=1)
    q, scale = tiled.scaled(q, scale)
    bounds, bits = blocks.masks(lo, hi, selected, num_keys, rows[0])
    of_queries = functools.partial(blocks.pad, multiple=rows[0], axis=2)
    of_keys = functools.partial(blocks.pad, multiple=rows[1])
    main = (
        of_queries(q.swapaxes(1, 2)),
        of_keys(k.swapaxes(1, 2), axis=2),
        of_queries(lse),
    )
    index = (
        of_queries(q_index.swapaxes(1, 2)),
        of_keys(k_index, axis=1),
        of_queries(w.astype(jnp.float32).swapaxes(1, 2)),
    )
    mask = bounds if bits is None else bits
    weight = of_queries(weight.astype(jnp.float32)[:, None])
    static = (scale, num_keys - num_queries, interpret)
    return _loss(index, main, (bounds, mask, weight), static)


def _tile_rows(q: Array, num_keys: int, axis: int) -> tuple[int, int]:
    return blocks.tile_rows(q, num_keys, axis, block_sizes.tpu().indexer_kl)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(index: tuple, main: tuple, rows: tuple, static: tuple) -> Array:
    """Computes the loss of whole blocks, heads first.

    Args:
      index: q [B, I, t, J], k [B, s, J], w [B, I, t].
      main: q [B, N, t, H], k [B, N, s, H], log-sum-exp [B, N, t].
      rows: bounds [B, 2, t]; bounds or bits [B, t, W]; weight [B, 1, t].
      static: the scale, S - T and interpret.
    """
    return jnp.sum(_over_tiles(index, main, rows, static, with_gradient=False)[0])


def _forward(index, main, rows, static):
    loss, *gradient = _over_tiles(index, main, rows, static, with_gradient=True)
    return dispatch.saved((jnp.sum(loss), gradient))


def _backward(static, gradient, factor):
    del static
    return gradient_lib.times(factor, gradient), None, None


_loss.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Specs:
    """Blocks of arrays in a grid of (part of a sequence, pair, group of heads)."""

    size: int  # entries of a list of pairs
    rows: tuple[int, int]
    parts: int
    groups: int

    def block(self, *shape: int, at: Callable) -> pl.BlockSpec:
        """Specifies a block at index at(b, i, j, g): sequence, queries, keys, heads."""

        def index(part: Array, p: Array, g: Array, pairs: Any) -> tuple:
            pair = pairs[part * self.size + p]
            g = jnp.where(pair < 0, self.groups - 1, g)  # fetches nothing for padding
            i, j = block_pairs.query_block(pair), block_pairs.key_block(pair)
            return at(part // self.parts, i, j, g)

        return pl.BlockSpec((1, *shape), index)

    def index(self, index: tuple) -> list[pl.BlockSpec]:
        """Specifies the indexer's q, k and w."""
        _, heads, _, dim = index[0].shape
        return [
            self.block(heads, self.rows[0], dim, at=lambda b, i, j, g: (b, 0, i, 0)),
            self.block(self.rows[1], dim, at=lambda b, i, j, g: (b, j, 0)),
            self.block(heads, self.rows[0], at=lambda b, i, j, g: (b, 0, i)),
        ]

    def main(self, dim: int) -> list[pl.BlockSpec]:
        """Specifies the attention's q, k and log-sum-exp."""
        rows, keys = self.rows
        return [
            self.block(HEADS, rows, dim, at=lambda b, i, j, g: (b, g, i, 0)),
            self.block(HEADS, keys, dim, at=lambda b, i, j, g: (b, g, j, 0)),
            self.block(HEADS, rows, at=lambda b, i, j, g: (b, g, i)),
        ]

    def mask(self, mask: Array) -> pl.BlockSpec:
        """Specifies bits, a run of keys at a time, or bounds."""
        runs = selection.RUN // self.rows[1]
        if mask.dtype == jnp.uint32:
            at = lambda b, i, j, g: (b, i, j // runs)
            return self.block(self.rows[0], LANES, at=at)
        return self.numbers(2)

    def numbers(self, count: int) -> pl.BlockSpec:
        """Specifies numbers [B, count, t] of each query."""
        return self.block(count, self.rows[0], at=lambda b, i, j, g: (b, 0, i))


def _over_tiles(
    index: tuple, main: tuple, rows: tuple, static: tuple, with_gradient: bool
) -> tuple:
    """Computes the loss [B, 1, t] and, on request, its gradient for q, k and w."""
    (q_index, k_index, w), (q, k, _), (bounds, mask, weight) = index, main, rows
    tile = _tile_rows(q, k.shape[2], axis=2)
    parts = min(block_sizes.tpu().cores, q.shape[2] // tile[0])  # each with its own dk
    groups = q.shape[1] // HEADS
    lo, hi = bounds[:, 0], bounds[:, 1]
    pairs = block_pairs.make(lo, hi, k.shape[2], tile, static[1], parts=parts)
    specs = _Specs(pairs.size, tile, parts, groups)
    norm = _norms(index, mask, pairs, specs, static[2])
    numbers = jnp.concatenate([norm, weight], axis=1)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    in_specs = [*specs.main(q.shape[3]), *specs.index(index)]
    in_specs += [specs.mask(mask), specs.numbers(2)]
    args = (*main, *index, mask, numbers)
    out_shape, out_specs = [like(norm)], [specs.numbers(1)]
    scratch = [pltpu.VMEM(tile[::-1], jnp.float32)] * 2
    kernel, aliases = _loss_kernel, {}
    main_work, index_work = (x.shape[1] * x.shape[3] for x in (q, q_index))
    work = main_work + index_work * (3 if with_gradient else 1)
    if with_gradient:
        _, heads, _, dim = q_index.shape
        zeros = jnp.zeros((len(q) * parts, *k_index.shape[1:]), jnp.float32)
        turned = specs.block(dim, tile[1], at=lambda b, i, j, g: (b, 0, j))
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        of_q, _, of_w = specs.index(index)
        in_specs += [turned, anywhere]
        args += (k_index.swapaxes(1, 2), zeros)
        out_shape += [like(q_index), like(w), like(zeros)]
        out_specs += [of_q, of_w, anywhere]
        scratch += [
            pltpu.VMEM((heads, dim, tile[0]), jnp.float32),
            pltpu.VMEM((tile[1], dim), jnp.float32),
            pltpu.SemaphoreType.DMA(()),
        ]
        # dk starts as zeros; the operands count the pairs too.
        kernel, aliases = _gradient_kernel, {len(args): 3}
    loss, *gradient = pl.pallas_call(
        functools.partial(kernel, scale=static[0], size=pairs.size),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(q) * parts, pairs.steps, groups),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        input_output_aliases=aliases,
        cost_estimate=_cost(q, k, work, args),
        compiler_params=_parameters(),
        interpret=static[2],
        name="indexer_kl_loss",
    )(pairs.flat, *args)
    if not with_gradient:
        return (loss,)
    dq, dw, dk = gradient
    dk = jnp.sum(dk.reshape(len(q), parts, *dk.shape[1:]), axis=1)
    return loss, dq, dk.astype(k_index.dtype), dw


def _parameters() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=block_sizes.tpu().vmem_bytes,
    )


def _norms(
    index: tuple, mask: Array, pairs: Any, specs: _Specs, interpret: bool
) -> Float[Array, "B 1 t"]:
    """Computes each query's log-sum-exp of indexer scores; 0 if it sees no key."""
    q, _, _ = index
    row = pltpu.VMEM((1, specs.rows[0]), jnp.float32)
    return pl.pallas_call(
        functools.partial(_norm_kernel, size=pairs.size),
        out_shape=jax.ShapeDtypeStruct((len(q), 1, q.shape[2]), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(q) * specs.parts, pairs.steps, 1),
            in_specs=[*specs.index(index), specs.mask(mask)],
            out_specs=specs.numbers(1),
            scratch_shapes=[pltpu.VMEM(specs.rows[::-1], jnp.float32), row, row],
        ),
        cost_estimate=_cost(q, index[1][:, None], q.shape[1] * q.shape[3], index),
        compiler_params=_parameters(),
        interpret=interpret,
        name="indexer_kl_norms",
    )(pairs.flat, *index, mask)


def _cost(q: Array, k: Array, work: int, arrays: Any) -> pl.CostEstimate:
    """Estimates the cost of `work` products per visible pair of query and key."""
    pairs = len(q) * cost.seen_pairs(q.shape[2], k.shape[2])
    return cost.estimate(2 * pairs * work, arrays)


def _norm_kernel(pairs: Any, *refs: Any, size: int) -> None:
    """Adds a block of keys to the log-sum-exp of a block of queries."""
    q_ref, k_ref, w_ref, mask_ref, norm_ref, scores_ref, top_ref, total_ref = refs
    pair = pairs[pl.program_id(0) * size + pl.program_id(1)]

    @pl.when(block_pairs.has(pair, block_pairs.FIRST))
    def _() -> None:
        top_ref[...] = jnp.full_like(top_ref, blocks.HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(block_pairs.is_pair(pair))
    def _() -> None:
        _score(q_ref, k_ref, w_ref, scores_ref)
        keep = blocks.keep(mask_ref, pair, k_ref.shape[1], key_axis=0)
        scores = jnp.where(keep, scores_ref[...], blocks.HIDDEN)
        top = jnp.maximum(top_ref[...], jnp.max(scores, axis=0, keepdims=True))
        total = jnp.sum(jnp.exp(scores - top), axis=0, keepdims=True)
        total_ref[...] = total_ref[...] * jnp.exp(top_ref[...] - top) + total
        top_ref[...] = top

    @pl.when(block_pairs.has(pair, block_pairs.LAST))
    def _() -> None:
        norm = top_ref[...] + jnp.log(total_ref[...])
        norm_ref[0] = jnp.where(top_ref[...] == blocks.HIDDEN, 0.0, norm)


def _score(q_ref: Any, k_ref: Any, w_ref: Any, scores_ref: Any) -> None:
    """Computes the sum over heads of w ReLU(q . k), keys x queries."""
    scores_ref[...] = jnp.zeros_like(scores_ref)

    def head(n: Array, _: None) -> None:
        dots = blocks.contract(k_ref[0], q_ref[0, n], (1, 1))
        scores_ref[...] += jnp.maximum(dots, 0) * w_ref[0, pl.ds(n, 1)]

    lax.fori_loop(0, q_ref.shape[1], head, None)


def _step(pairs: Any, size: int) -> tuple[Array, Array, Array]:
    """Returns the pair, and whether this is its first or last group of heads."""
    group = pl.program_id(2)
    pair = pairs[pl.program_id(0) * size + pl.program_id(1)]
    return pair, group == 0, group == pl.num_programs(2) - 1


def _loss_kernel(pairs: Any, *refs: Any, scale: float, size: int) -> None:
    """Adds a group of heads to a tile's probabilities; the last group adds the loss."""
    q_ref, k_ref, lse_ref, q_index_ref, k_index_ref, w_ref, mask_ref = refs[:7]
    numbers_ref, loss_ref, target_ref, scores_ref = refs[7:]
    pair, is_first, is_last = _step(pairs, size)

    @pl.when(is_first & block_pairs.has(pair, block_pairs.FIRST))
    def _() -> None:
        loss_ref[...] = jnp.zeros_like(loss_ref)

    @pl.when(is_first & block_pairs.is_pair(pair))
    def _() -> None:
        target_ref[...] = jnp.zeros_like(target_ref)

    @pl.when(block_pairs.is_pair(pair))
    def _() -> None:
        _add_probabilities(q_ref, k_ref, lse_ref, target_ref, scale)

    @pl.when(is_last & block_pairs.is_pair(pair))
    def _() -> None:
        _score(q_index_ref, k_index_ref, w_ref, scores_ref)
        keep = blocks.keep(mask_ref, pair, k_ref.shape[2], key_axis=0)
        share = 1 / (HEADS * pl.num_programs(2))
        target_ref[...] = jnp.where(keep, target_ref[...] * share, 0)
        _add_loss(keep, target_ref, numbers_ref, scores_ref, loss_ref)


def _gradient_kernel(pairs: Any, *refs: Any, scale: float, size: int) -> None:
    """Does `_loss_kernel`'s work; the last group of heads also adds the gradient."""
    inputs, (turned_ref, _, loss_ref, dq_ref, dw_ref, dk_hbm) = refs[:8], refs[8:14]
    target_ref, scores_ref, dq_sum, dk_ref, semaphore = refs[14:]
    pair, is_first, is_last = _step(pairs, size)
    keys = dk_ref.shape[0]
    place = pl.ds(block_pairs.key_block(pair) * keys, keys)
    in_hbm = dk_hbm.at[pl.program_id(0), place]
    fetch = pltpu.make_async_copy(in_hbm, dk_ref, semaphore)
    write = pltpu.make_async_copy(dk_ref, in_hbm, semaphore)

    @pl.when(is_first & block_pairs.has(pair, block_pairs.FIRST))
    def _() -> None:
        dw_ref[...] = jnp.zeros_like(dw_ref)
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when(is_first & block_pairs.is_pair(pair))
    def _() -> None:
        fetch.start()

    arrays = (loss_ref, target_ref, scores_ref)
    _loss_kernel(pairs, *inputs, *arrays, scale=scale, size=size)

    @pl.when(is_last & block_pairs.is_pair(pair))
    def _() -> None:
        fetch.wait()
        arrays = (target_ref, inputs[3:6], turned_ref, scores_ref, inputs[7])
        _add_gradient(*arrays, (dq_sum, dk_ref, dw_ref))
        write.start()
        write.wait()

    @pl.when(is_last & block_pairs.has(pair, block_pairs.LAST))
    def _() -> None:
        for n in range(dq_sum.shape[0]):
            dq_ref[0, n] = dq_sum[n].T.astype(dq_ref.dtype)


def _add_probabilities(
    q_ref: Any, k_ref: Any, lse_ref: Any, target_ref: Any, scale: float
) -> None:
    """Adds exp(scale q . k - log-sum-exp) of each head; not masked yet."""

    def head(n: Array, _: None) -> None:
        scores = blocks.contract(k_ref[0, n], q_ref[0, n], (1, 1)) * scale
        target_ref[...] += jnp.exp(scores - lse_ref[0, pl.ds(n, 1)])

    lax.fori_loop(0, HEADS, head, None)


def _add_loss(
    keep: Array, target_ref: Any, numbers_ref: Any, scores_ref: Any, loss_ref: Any
) -> None:
    """Adds weight * sum of p (log p - I + norm), and replaces I by its log softmax."""
    target = target_ref[...]
    norm, weight = numbers_ref[0, 0:1], numbers_ref[0, 1:2]
    log_probs = jnp.where(keep, scores_ref[...] - norm, blocks.HIDDEN)
    log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - log_probs
    kl = jnp.sum(jnp.where(keep, target * log_ratio, 0), axis=0, keepdims=True)
    loss_ref[0] += weight * kl
    scores_ref[...] = log_probs


def _add_gradient(
    target_ref: Any,
    index: tuple,
    turned_ref: Any,
    scores_ref: Any,
    numbers_ref: Any,
    sums: tuple,
) -> None:
    """Adds dq (transposed), dk and dw of dI = softmax(I) - p, from log softmax(I)."""
    (q_ref, k_ref, w_ref), (dq_sum, dk_ref, dw_ref) = index, sums
    d_scores = jnp.exp(scores_ref[...]) - target_ref[...]
    scores_ref[...] = d_scores * numbers_ref[0, 1:2]

    def head(n: Array, _: None) -> None:
        q, row = q_ref[0, n], pl.ds(n, 1)
        dots = blocks.contract(k_ref[0], q, (1, 1))
        d_scores = jnp.where(dots > 0, scores_ref[...], 0)
        dw_ref[0, row] += jnp.sum(dots * d_scores, axis=0, keepdims=True)
        d_dots = (d_scores * w_ref[0, row]).astype(q.dtype)
        dk_ref[...] += blocks.contract(d_dots, q, (1, 0))
        dq_sum[n] += blocks.contract(turned_ref[0], d_dots, (1, 0))

    lax.fori_loop(0, q_ref.shape[1], head, None)
