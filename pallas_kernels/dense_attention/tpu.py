"""Flash attention on TPUs over documents or over selected keys.

The grid is a list of pairs of query and key blocks (`pallas_kernels.block_pairs`). A
selection comes as bits: a run of 4096 keys is 128 words per query. Block n of 128 keys
is bit n of each word, so that a shift and a comparison make its mask.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import block_pairs, block_sizes, cost, dispatch
from pallas_kernels.dense_attention import tiled, tpu_backward
from pallas_kernels.dense_attention import tpu_blocks as blocks

LANES, HIDDEN = blocks.LANES, blocks.HIDDEN


def unsupported_dense_attention(
    q: Array,
    k: Array,
    v: Array,
    lo: Array,
    hi: Array,
    selected: Array | None,
    scale: float,
) -> str | None:
    """Returns why the kernel cannot take these shapes, or None."""
    del lo, hi, selected, scale
    lengths, dims = (q.shape[1], k.shape[1]), (q.shape[3], v.shape[3])
    if dims[0] % LANES or dims[1] % LANES:
        return f"head dims must be multiples of {LANES}, got {dims}."
    rows = _tile_rows(q, k.shape[1], axis=1)
    num_blocks = (-(-lengths[0] // rows[0]), -(-lengths[1] // rows[1]))
    pairs = len(q) * block_pairs.size(num_blocks, rows, lengths[1] - lengths[0])
    if pairs > block_pairs.MAX_PAIRS:
        return f"{pairs} pairs of blocks do not fit scalar memory; split the batch."
    return None


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N O"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    selected: Array | None,
    scale: float,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N T"]]:
    """See `pallas_kernels.dense_attention`."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    rows = _tile_rows(q, num_keys, axis=1)
    q, scale = tiled.scaled(q, scale)
    bounds, bits = blocks.masks(lo, hi, selected, num_keys, rows[0])
    q, k, v = (
        blocks.pad(x.swapaxes(1, 2), r, 2)
        for x, r in ((q, rows[0]), (k, rows[1]), (v, rows[1]))
    )
    static = (scale, num_keys - num_queries, interpret)
    out, lse = _attend(q, k, v, bounds, bits, static)
    return out[:, :, :num_queries].swapaxes(1, 2), lse[:, :, :num_queries]


def _tile_rows(q: Array, num_keys: int, axis: int) -> tuple[int, int]:
    return blocks.tile_rows(q, num_keys, axis, block_sizes.tpu().dense_attention)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: Float[Array, "B N t H"],
    k: Float[Array, "B N s H"],
    v: Float[Array, "B N s O"],
    bounds: Int[Array, "B 2 t"],
    bits: Array | None,
    static: tuple[float, int, bool],
) -> tuple[Float[Array, "B N t O"], Float[Array, "B N t"]]:
    """Runs the kernel on whole blocks; `static` is the scale, S - T and interpret."""
    scale, offset, interpret = static
    batch, heads, num_queries, dim = q.shape
    num_keys, out_dim = v.shape[2:]
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    rows = _tile_rows(q, num_keys, axis=2)
    pairs = block_pairs.make(bounds[:, 0], bounds[:, 1], num_keys, rows, offset)
    specs = blocks.Specs(pairs.size, rows)
    statistic = pltpu.VMEM((rows[0], LANES), jnp.float32)
    work = 2 * batch * heads * cost.seen_pairs(num_queries, num_keys)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale, size=pairs.size),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, num_queries, out_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, num_queries), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, pairs.steps),
            in_specs=[
                specs.queries(dim),
                specs.keys(dim),
                specs.keys(out_dim),
                specs.mask(bits is not None),
            ],
            out_specs=(specs.queries(out_dim), specs.statistics(1)),
            scratch_shapes=[
                pltpu.VMEM((rows[0], out_dim), jnp.float32),
                statistic,
                statistic,
            ],
        ),
        cost_estimate=cost.estimate(work * (dim + out_dim), q, k, v),
        compiler_params=blocks.parameters(),
        interpret=interpret,
        name="dense_attention",
    )(pairs.flat, q, k, v, bounds if bits is None else bits)
    return out, lse[:, :, 0]


def _kernel(pairs: Any, *refs: Any, scale: float, size: int) -> None:
    """Adds a block of keys to the softmax of a block of queries.

    Each of 128 lanes has its own sum; the last block of keys adds them up.
    """
    q_ref, k_ref, v_ref, mask_ref, out_ref, lse_ref, sum_ref, top_ref, total_ref = refs
    pair = pairs[pl.program_id(0) * size + pl.program_id(2)]
    is_bits = mask_ref.dtype == jnp.uint32

    @pl.when(block_pairs.has(pair, block_pairs.FIRST))
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)
        top_ref[...] = jnp.full_like(top_ref, HIDDEN)
        total_ref[...] = jnp.zeros_like(total_ref)

    def add(is_whole: bool) -> None:
        keys = k_ref.shape[2]
        scores = blocks.contract(q_ref[0, 0], k_ref[0, 0], (1, 1)) * scale
        if not is_whole:
            keep = blocks.keep(mask_ref, pair, keys, key_axis=1)
            scores = jnp.where(keep, scores, HIDDEN)
        top = jnp.maximum(top_ref[...], jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(top_ref[...] - top)
        weights = jnp.exp(scores - blocks.wide(top, keys))
        total = total_ref[...] * shrink
        for n in range(0, keys, LANES):
            total += weights[:, n : n + LANES]
        value = blocks.contract(weights.astype(v_ref.dtype), v_ref[0, 0], (1, 0))
        sum_ref[...] = sum_ref[...] * blocks.wide(shrink, value.shape[1]) + value
        top_ref[...], total_ref[...] = top, total

    is_whole = block_pairs.has(pair, block_pairs.WHOLE) & (not is_bits)
    pl.when(is_whole)(functools.partial(add, is_whole=True))
    pl.when(block_pairs.is_pair(pair) & ~is_whole)(
        functools.partial(add, is_whole=False)
    )

    @pl.when(block_pairs.has(pair, block_pairs.LAST))
    def _() -> None:
        top = top_ref[...]
        is_empty = top == HIDDEN
        total = jnp.sum(total_ref[...], axis=1, keepdims=True)
        inverse = jnp.where(is_empty, 0.0, 1 / total)
        out = sum_ref[...] * blocks.wide(inverse, sum_ref.shape[1])
        out_ref[0, 0] = out.astype(out_ref.dtype)
        lse = jnp.where(is_empty, 0.0, top + jnp.log(total))
        lse_ref[0, 0] = lse.T[0:1]


def _forward(q, k, v, bounds, bits, static):
    out, lse = dispatch.saved(_attend(q, k, v, bounds, bits, static))
    return (out, lse), (q, k, v, bounds, bits, out, lse)


def _backward(static, residuals, cotangents):
    *inputs, out, lse = residuals
    d_out, d_lse = cotangents
    products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    shift = jnp.sum(products, axis=-1) - d_lse
    statistics = jnp.stack([lse, shift], axis=2)
    rows = _tile_rows(out, inputs[1].shape[2], axis=2)
    return tpu_backward.gradients(tuple(inputs), d_out, statistics, rows, static)


_attend.defvjp(_forward, _backward)
