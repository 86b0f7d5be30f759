"""Grouped products with codes on TPU: codes leave HBM as they are, and once.

A matrix of codes is in VMEM at a time, while the next one comes, and all rows are. Each
tile of a group's rows meets the matrix block by block of inputs. A block is made into
the type of the rows just before its product, and the scales of its columns multiply
the sums. Two int4 codes of a byte belong to neighbouring inputs; since VMEM has no
cheap way to interleave rows, the columns of x are reordered instead.

Compiled for v5p, not timed. Making codes into the type of the rows takes vector
operations that no roofline counts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, cost, mapped

ROWS = 32  # of a tile: those of int8 in VMEM
LANES = 128
_MOST = 512  # inputs that are made into the type of the rows at a time
_COLUMNS = 1024  # of a matrix in VMEM


def grouped_codes(
    x: Array,
    codes: Array,
    scales: Float[Array, "some blocks F"],
    group_sizes: Int[Array, " E"],
    first: Int[Array, ""],
    *,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_codes`."""
    num_rows, depth = x.shape
    _, stored, width = codes.shape
    num_blocks, dtype = scales.shape[1], _type_of_y(x)
    columns, part = _columns(width), _part(depth // num_blocks)
    is_packed = codes.dtype == jnp.uint8
    if is_packed:  # in each part, the even inputs, then the odd ones
        pairs = x.reshape(num_rows, -1, part // 2, 2)
        x = pairs.swapaxes(2, 3).reshape(num_rows, depth)
    is_float8 = codes.dtype == jnp.float8_e4m3fn
    x = jnp.pad(x, ((0, -num_rows % ROWS), (0, 0)))
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes.astype(jnp.int32)
    of_scales = first if len(scales) == len(codes) else jnp.zeros_like(first)
    out = mapped.pallas_call(
        functools.partial(
            _kernel,
            block=depth // num_blocks,
            part=part,
            decode=_float8 if is_float8 else _int4 if is_packed else _int8,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(width // columns, len(group_sizes)),
            in_specs=[
                pl.BlockSpec(x.shape, lambda j, e, *_: (0, 0)),
                pl.BlockSpec(
                    (None, stored, columns), lambda j, e, at, *_: (at[0] + e, 0, j)
                ),
                pl.BlockSpec(
                    (None, num_blocks, columns), lambda j, e, at, *_: (at[1] + e, 0, j)
                ),
            ],
            out_specs=pl.BlockSpec((len(x), columns), lambda j, e, *_: (0, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x), width), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=block_sizes.tpu().vmem_bytes,
        ),
        cost_estimate=_cost(x, codes, scales, len(group_sizes), dtype),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="grouped_codes",
    )(jnp.stack([first, of_scales]), starts, ends, x, codes, scales)
    return out[:num_rows]


def unsupported_grouped_codes(
    x: Array, codes: Array, scales: Array, group_sizes: Array, first: Array
) -> str | None:
    """Returns why shapes or dtypes cannot be taken."""
    del group_sizes, first
    (num_rows, depth), (_, stored, width) = x.shape, codes.shape
    block, num_blocks = depth // scales.shape[1], scales.shape[1]
    if x.dtype not in (jnp.bfloat16, jnp.int8):
        return f"x must be bfloat16 or int8, got {x.dtype}"
    if x.dtype == jnp.int8 and codes.dtype == jnp.float8_e4m3fn:
        return "int8 rows meet integer codes, got float8_e4m3fn"
    if width % LANES or _part(block) % LANES:
        return (
            f"columns and blocks must be multiples of {LANES}, got {width} and {block}"
        )
    columns, size = _columns(width), _type_of_y(x).itemsize
    rows = num_rows + -num_rows % ROWS
    needed = 2 * rows * (depth * x.dtype.itemsize + columns * size)
    needed += 2 * columns * (stored + 4 * num_blocks)
    needed += 4 * columns * (4 * ROWS + 4 * _part(block))  # what a tile computes with
    if needed > (limit := block_sizes.tpu().vmem_bytes):
        return f"{num_rows} rows take {needed} bytes of VMEM, of {limit}"
    return None


def _type_of_y(x: Array) -> Any:
    return jnp.dtype(jnp.float32 if x.dtype == jnp.int8 else x.dtype)


def _columns(width: int) -> int:
    """Returns the columns of a matrix that are in VMEM at a time."""
    return _divisor(width, _COLUMNS)


def _part(block: int) -> int:
    """Returns the inputs of a block that are multiplied at a time."""
    return _divisor(block, _MOST)


def _divisor(size: int, most: int) -> int:
    """Returns the largest number of whole tiles that divides a size, or the size."""
    return next((n for n in range(most, 0, -LANES) if size % n == 0), size)


def _cost(
    x: Array, codes: Array, scales: Array, num_groups: int, dtype: Any
) -> pl.CostEstimate:
    """Estimates the cost: the groups' matrices and all rows once."""
    own = [
        jax.ShapeDtypeStruct((num_groups, *a.shape[1:]), a.dtype)
        for a in (codes, scales)
    ]
    y = jax.ShapeDtypeStruct((len(x), codes.shape[2]), dtype)
    return cost.estimate(2 * x.size * codes.shape[2], x, y, *own)


def _kernel(
    at: Any,
    starts: Any,
    ends: Any,
    x: Any,
    codes: Any,
    scales: Any,
    y: Any,
    *,
    block: int,
    part: int,
    decode: Any,
) -> None:
    """Multiplies the rows of a group by some columns of its matrix."""
    del at  # read by the block specs alone
    e = pl.program_id(1)
    kind = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    stored = codes.shape[0] * part // x.shape[1]  # rows of codes in a part

    @pl.when(e == 0)
    def _() -> None:
        y[...] = jnp.zeros_like(y)

    start, end = starts[e], ends[e]

    def tile(i: Array, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)

        def add(k: Array, total: Array) -> Array:
            inputs = pl.ds(pl.multiple_of(k * part, LANES), part)
            coded = pl.ds(pl.multiple_of(k * stored, stored), stored)
            # Here: XLA would copy the whole stack.
            bits = pltpu.bitcast(codes[coded, :], jnp.int8).astype(jnp.int32)
            matrix = decode(bits).astype(x.dtype)
            sums = jnp.dot(x[rows, inputs], matrix, preferred_element_type=kind)
            scale = scales[pl.ds(k * part // block, 1), :]
            return total + sums.astype(jnp.float32) * scale

        zeros = jnp.zeros((ROWS, codes.shape[1]), jnp.float32)
        total = lax.fori_loop(0, x.shape[1] // part, add, zeros)
        row = i * ROWS + lax.broadcasted_iota(jnp.int32, total.shape, 0)
        is_mine = (row >= start) & (row < end)
        before = y[rows, :].astype(jnp.float32)
        y[rows, :] = jnp.where(is_mine, total, before).astype(y.dtype)

    last = jnp.where(end > start, (end + ROWS - 1) // ROWS, start // ROWS)
    lax.fori_loop(start // ROWS, last, tile, None)


def _int8(codes: Array) -> Array:
    return codes.astype(jnp.float32)


def _int4(codes: Array) -> Array:
    """Returns the codes in the lower bits of all bytes, then those in the higher."""
    low, high = (codes << 28) >> 28, (codes << 24) >> 28
    return jnp.concatenate([low, high]).astype(jnp.float32)


def _float8(codes: Array) -> Array:
    """Returns e4m3 numbers of their bits, exactly: chips before v6e have none.

    The bits of exponent and mantissa are put where float32 has them, which leaves a
    factor of 2^(127 - 7). A TPU would take subnormal ones for zero.
    """
    exponent_and_mantissa = (codes & 0x7F) << 20
    normal = lax.bitcast_convert_type(exponent_and_mantissa, jnp.float32) * 2.0**120
    subnormal = (codes & 7).astype(jnp.float32) * 2.0**-9
    size = jnp.where((codes & 0x78) == 0, subnormal, normal)
    return jnp.where(codes < 0, -size, size)
