"""Blocks, masks and products of blocks for the TPU's attention kernels."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import block_pairs, block_sizes, selection

LANES = selection.LANES
HIDDEN = -1e30  # score of a key that is not selected; exp(HIDDEN - finite) is 0


@dataclasses.dataclass(frozen=True)
class Specs:
    """Blocks of arrays in a grid of (sequence, head, pair).

    Attributes:
      size: entries of a list of pairs.
      rows: rows of a query block and of a key block.
    """

    size: int
    rows: tuple[int, int]

    def queries(self, dim: int) -> pl.BlockSpec:
        """Specifies queries [B, N, t, dim]."""

        def index(b: Array, n: Array, p: Array, pairs: Any) -> tuple:
            return b, n, block_pairs.query_block(pairs[b * self.size + p]), 0

        return pl.BlockSpec((1, 1, self.rows[0], dim), index)

    def keys(self, dim: int) -> pl.BlockSpec:
        """Specifies keys [B, N, s, dim]."""

        def index(b: Array, n: Array, p: Array, pairs: Any) -> tuple:
            return b, n, block_pairs.key_block(pairs[b * self.size + p]), 0

        return pl.BlockSpec((1, 1, self.rows[1], dim), index)

    def statistics(self, count: int) -> pl.BlockSpec:
        """Specifies numbers [B, N, count, t] of each query."""

        def index(b: Array, n: Array, p: Array, pairs: Any) -> tuple:
            return b, n, 0, block_pairs.query_block(pairs[b * self.size + p])

        return pl.BlockSpec((1, 1, count, self.rows[0]), index)

    def mask(self, is_bits: bool) -> pl.BlockSpec:
        """Specifies bits [B, t, W], a run of keys at a time, or bounds [B, 2, t]."""

        def bits(b: Array, n: Array, p: Array, pairs: Any) -> tuple:
            del n
            pair = pairs[b * self.size + p]
            run = block_pairs.key_block(pair) * self.rows[1] // selection.RUN
            return b, block_pairs.query_block(pair), run

        def bounds(b: Array, n: Array, p: Array, pairs: Any) -> tuple:
            del n
            return b, 0, block_pairs.query_block(pairs[b * self.size + p])

        if is_bits:
            return pl.BlockSpec((1, self.rows[0], LANES), bits)
        return pl.BlockSpec((1, 2, self.rows[0]), bounds)


def parameters() -> pltpu.CompilerParams:
    """Returns compiler parameters of a grid whose last axis sums."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=block_sizes.tpu().vmem_bytes,
    )


def tile_rows(
    q: Array, num_keys: int, axis: int, most: tuple[int, int]
) -> tuple[int, int]:
    """Returns the rows of a query block and of a key block, powers of two.

    Args:
      q: queries, on `axis`. Blocks of types wider than bfloat16 have fewer rows.
      num_keys: S, which limits the rows of a key block.
      axis: axis of the queries.
      most: most rows in bfloat16.
    """
    width = max(q.dtype.itemsize // 2, 1)
    queries, keys = (max(rows // width, LANES) for rows in most)
    few = -(-q.shape[axis] // LANES) * LANES
    return min(queries, few), min(keys, max(LANES, 1 << (num_keys - 1).bit_length()))


def pad(x: Array, multiple: int, axis: int) -> Array:
    """Appends zeros to an axis up to a multiple; bounds of 0 see nothing."""
    size = -x.shape[axis] % multiple
    widths = [(0, size if n == axis else 0) for n in range(x.ndim)]
    return jnp.pad(x, widths) if size else x


def masks(
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    selected: Array | None,
    num_keys: int,
    rows: int,
) -> tuple[Int[Array, "B 2 t"], Array | None]:
    """Returns bounds (and bits, if keys are selected) of whole query blocks."""
    bounds = jnp.stack([jnp.maximum(lo, 0), jnp.minimum(hi, num_keys)], axis=1)
    if selected is None:
        return pad(bounds, rows, 2), None
    bits = selection.pack(selected) if selected.dtype == bool else selected
    return pad(bounds, rows, 2), pad(bits, rows, 1)


def contract(a: Array, b: Array, axes: tuple[int, int]) -> Float[Array, "rows columns"]:
    """Multiplies matrices over one axis of each, into float32."""
    return lax.dot_general(
        a,
        b,
        (((axes[0],), (axes[1],)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
    )


def column(row: Array) -> Array:
    """Turns a row [1, Q] into a column in all lanes, [Q, 128]."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def wide(x: Array, size: int) -> Array:
    """Repeats a column of 128 equal lanes to `size` lanes."""
    return jnp.concatenate([x] * (size // LANES), axis=1)


def keep(mask_ref: Any, pair: Array, keys: int, key_axis: int) -> Array:
    """Returns which keys of the pair's block count, from bits or bounds."""
    j = block_pairs.key_block(pair)
    if mask_ref.dtype == jnp.uint32:
        words = mask_ref[0].astype(jnp.int32)
        words = words if key_axis == 1 else words.T
        words = words >> (j * keys % selection.RUN // LANES)
        parts = [(words & (1 << n)) != 0 for n in range(keys // LANES)]
        return jnp.concatenate(parts, axis=key_axis)
    lo, hi = mask_ref[0, 0:1], mask_ref[0, 1:2]
    if key_axis == 1:
        lo, hi = (wide(column(x), keys) for x in (lo, hi))
    shape = (keys, lo.shape[1]) if key_axis == 0 else lo.shape
    s = j * keys + lax.broadcasted_iota(jnp.int32, shape, key_axis)
    return (s >= lo) & (s < hi)
