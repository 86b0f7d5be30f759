"""Grouped products on GPUs, in Triton: y = x w[e], dx = dy w[e]^T, dw[e] = x^T dy.

The grid does not depend on the routing. ceil(M / ROWS) + E tiles of rows are enough for
any group sizes. A table in memory holds each tile's group and end; unused tiles return
at once. Eight tiles of rows run side by side over all columns, so that a matrix
is read from HBM once for all tiles of its group, and a row once for all columns.
On an H200 they reach 457 TFLOP/s forward at 256 rows an expert (docs/kernels.md).
"""

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from pallas_kernels import block_sizes, capabilities, dispatch, triton_call
from pallas_kernels.grouped_matmul import reference, tile_table

SIDE_BY_SIDE = 8  # tiles of rows that share matrices in the L2 cache
FLOAT32_TILE = capabilities.Tile((64, 64, 32), 8, 3)


def grouped_matmul(
    x: Float[Array, "M D"],
    w: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul`."""
    return _grouped(x, w, group_sizes, interpret)


def grouped_matmul_quantized(
    x: Float[Array, "M D"],
    w: Array,
    scales: Float[Array, "E row_blocks column_blocks"],
    group_sizes: Int[Array, " E"],
    *,
    interpret: bool = False,
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul_quantized`.

    Codes of 8 bits are exact in bfloat16. So each block of 128 x 128 is multiplied
    unscaled, and its sum is scaled in float32: no weight is rounded.
    """
    return _quantized(x, w, scales, group_sizes, interpret)


def unsupported_grouped_matmul(x: Array, w: Array, group_sizes: Array) -> str | None:
    """Returns why these arguments cannot be taken, or None."""
    del group_sizes
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return (
            "x and w must both be bfloat16 or both float32, "
            f"got {x.dtype} and {w.dtype}."
        )
    return None


def unsupported_grouped_matmul_quantized(
    x: Array, w: Array, scales: Array, group_sizes: Array
) -> str | None:
    """Returns why these arguments cannot be taken, or None."""
    del scales, group_sizes
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x must be bfloat16 or float32, got {x.dtype}."
    capability = dispatch.capability() or capabilities.HOPPER
    if w.dtype == jnp.float8_e4m3fn and capability < capabilities.FLOAT8:
        return "codes of float8_e4m3fn need compute capability 8.9; int8 ones do not."
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(x: Array, w: Array, group_sizes: Array, interpret: bool) -> Array:
    return _rows_times_matrix(x, w, None, group_sizes, False, interpret)


def _forward(x, w, group_sizes, interpret):
    y = dispatch.saved(_grouped(x, w, group_sizes, interpret))
    return y, (x, w, group_sizes)


def _backward(interpret, residuals, dy):
    x, w, group_sizes = residuals
    dx = _rows_times_matrix(dy, w, None, group_sizes, True, interpret)
    return dx, _rows_times_rows(x, dy, group_sizes, interpret), None


_grouped.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _quantized(
    x: Array, w: Array, scales: Array, group_sizes: Array, interpret: bool
) -> Array:
    return _rows_times_matrix(x, w, scales, group_sizes, False, interpret)


def _quantized_forward(x, w, scales, group_sizes, interpret):
    y = dispatch.saved(_quantized(x, w, scales, group_sizes, interpret))
    return y, (w, scales, group_sizes)


def _quantized_backward(interpret, residuals, dy):
    """The weights are constants."""
    w, scales, group_sizes = residuals
    dx = _rows_times_matrix(dy, w, scales, group_sizes, True, interpret)
    return dx, None, None, None


_quantized.defvjp(_quantized_forward, _quantized_backward)


def _width(size: int, most: int) -> int:
    """Columns of a tile."""
    return max(16, min(most, triton.next_power_of_2(size)))


def _tile(is_half: bool, is_quantized: bool) -> capabilities.Tile:
    """Returns rows, columns and depth of a tile; a tile of codes has one scale."""
    if not is_half:
        return FLOAT32_TILE
    tiles = block_sizes.gpu()
    return tiles.grouped_matmul_quantized if is_quantized else tiles.grouped_matmul


def _rows_times_matrix(
    x: Array,
    w: Array,
    scales: Array | None,
    group_sizes: Array,
    transposed: bool,
    interpret: bool,
) -> Array:
    """Multiplies rows [M, C] by w [E, C, O], or [E, O, C] if transposed: [M, O]."""
    num_rows, num_groups = x.shape[0], w.shape[0]
    depth, width = (w.shape[2], w.shape[1]) if transposed else w.shape[1:]
    is_half, is_quantized = x.dtype.itemsize == 2, scales is not None
    tile = _tile(is_half, is_quantized)
    most, cols, step = tile.sizes
    is_full = is_half and num_rows >= 64 * num_groups
    rows, cols = most if is_full else 64, _width(width, cols)
    table = tile_table.make(group_sizes, num_rows, rows)
    num_tiles = table.shape[1]
    down, across = (0, 0) if scales is None else scales.shape[1:]
    sizes: dict[str, Any] = {
        "M": num_rows, "C": depth, "O": width, "E": num_groups, "TILES": num_tiles,
        "STEP_C": 1 if transposed else w.shape[2],
        "STEP_O": w.shape[2] if transposed else 1,
        "BM": rows, "BO": cols, "SIDE": SIDE_BY_SIDE,
        "BC": step,
        "SCALE_BLOCK": reference.SCALE_BLOCK, "SCALES": down * across,
        "SCALE_C": 1 if transposed else across,
        "SCALE_O": across if transposed else 1,
    }  # fmt: skip
    [y] = triton_call.call(
        _rows_times_matrix_kernel,
        x,
        w,
        table if scales is None else scales,
        table,
        out_shape=[jax.ShapeDtypeStruct((num_rows, width), x.dtype)],
        grid=(num_tiles * triton.cdiv(width, cols),),
        num_warps=tile.warps if is_full else 4,
        num_stages=tile.stages,
        interpret=interpret,
        **sizes,
    )
    return y


def _rows_times_rows(x: Array, dy: Array, group_sizes: Array, interpret: bool) -> Array:
    """Computes dw[e] = x_e^T dy_e: [E, K, N]."""
    num_groups, depth, width = group_sizes.shape[0], x.shape[1], dy.shape[1]
    is_half = x.dtype.itemsize == 2
    tile = block_sizes.gpu().grouped_matmul_dw if is_half else FLOAT32_TILE
    rows, cols = _width(depth, tile.sizes[0]), _width(width, tile.sizes[1])
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    [dw] = triton_call.call(
        _rows_times_rows_kernel,
        x,
        dy,
        jnp.concatenate([jnp.zeros_like(ends[:1]), ends]),
        out_shape=[jax.ShapeDtypeStruct((num_groups, depth, width), x.dtype)],
        grid=(triton.cdiv(depth, rows) * triton.cdiv(width, cols), num_groups),
        num_warps=tile.warps,
        num_stages=tile.stages,
        interpret=interpret,
        **{"K": depth, "N": width, "BM": tile.sizes[2], "BK": rows, "BN": cols},
    )
    return dw


@triton.jit
@typing.no_type_check
def _place(
    table, TILES: tl.constexpr, COLUMNS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """Returns a tile's group, first row, end and column; rows run fastest."""
    pid = tl.program_id(0)
    first = pid // (SIDE * COLUMNS) * SIDE
    side = tl.minimum(TILES - first, SIDE)
    tile = first + pid % (SIDE * COLUMNS) % side
    group = tl.load(table + tile)
    start, end = tl.load(table + TILES + tile), tl.load(table + 2 * TILES + tile)
    return group, start, end, pid % (SIDE * COLUMNS) // side


@triton.jit
@typing.no_type_check
def _rows_times_matrix_kernel(
    x, w, scales, table, y,
    M: tl.constexpr, C: tl.constexpr, O: tl.constexpr, E: tl.constexpr,
    TILES: tl.constexpr, STEP_C: tl.constexpr, STEP_O: tl.constexpr,
    BM: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr, SIDE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, SCALES: tl.constexpr, SCALE_C: tl.constexpr,
    SCALE_O: tl.constexpr,
):  # fmt: skip
    """Computes a tile [BM, BO] of y; if SCALES > 0, w has a scale per tile."""
    group, start, end, column = _place(table, TILES, tl.cdiv(O, BO), SIDE)
    if start >= end:
        return
    rows, cols = tl.arange(0, BM), column * BO + tl.arange(0, BO)
    seen = cols if O % BO == 0 else tl.minimum(cols, O - 1)
    depth = tl.arange(0, BC)
    # Rows of the next group are read but not written.
    near = tl.minimum(rows, M - 1 - start)
    x += start.to(tl.int64) * C
    w += group.to(tl.int64) * (C * O)
    total = tl.zeros((BM, BO), tl.float32)
    for c in range(0, tl.where(group < E, C, 0), BC):
        x_at = x + near[:, None] * C + (c + depth)[None, :]
        w_at = w + (c + depth)[:, None] * STEP_C + seen[None, :] * STEP_O
        if C % BC == 0:
            x_tile, w_tile = tl.load(x_at), tl.load(w_at)
        else:
            x_tile = tl.load(x_at, mask=(c + depth < C)[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=(c + depth < C)[:, None], other=0.0)
        if SCALES > 0:
            exact = w_tile.to(tl.float32).to(x_tile.dtype)
            part = tl.dot(x_tile, exact, input_precision="ieee")
            place = c // SCALE_BLOCK * SCALE_C + column * BO // SCALE_BLOCK * SCALE_O
            total += part * tl.load(scales + group * SCALES + place)
        else:
            total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
    y_at = y + start.to(tl.int64) * O + rows[:, None] * O + cols[None, :]
    is_mine = (start + rows < end)[:, None] & (cols < O)[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=is_mine)


@triton.jit
@typing.no_type_check
def _rows_times_rows_kernel(
    x, dy, bounds, dw,
    K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Computes a tile [BK, BN] of dw[e], summed over the rows of group e."""
    group, tile = tl.program_id(1), tl.program_id(0)
    start, end = tl.load(bounds + group), tl.load(bounds + group + 1)
    down = tile // tl.cdiv(N, BN) * BK + tl.arange(0, BK)
    cols = tile % tl.cdiv(N, BN) * BN + tl.arange(0, BN)
    down_seen = down if K % BK == 0 else tl.minimum(down, K - 1)
    cols_seen = cols if N % BN == 0 else tl.minimum(cols, N - 1)
    x += start.to(tl.int64) * K
    dy += start.to(tl.int64) * N
    total = tl.zeros((BK, BN), tl.float32)
    for first in range(0, end - start, BM):
        rows = tl.arange(0, BM)
        is_row = first + rows < end - start
        x_at = x + triton_call.far(first, K) + rows[None, :] * K + down_seen[:, None]
        dy_at = dy + triton_call.far(first, N) + rows[:, None] * N + cols_seen[None, :]
        x_tile = tl.load(x_at, mask=is_row[None, :], other=0.0)
        dy_tile = tl.load(dy_at, mask=is_row[:, None], other=0.0)
        total = tl.dot(x_tile, dy_tile, total, input_precision="ieee")
    at = dw + group.to(tl.int64) * (K * N) + down[:, None] * N + cols[None, :]
    is_mine = (down < K)[:, None] & (cols < N)[None, :]
    tl.store(at, total.to(dw.dtype.element_ty), mask=is_mine)
