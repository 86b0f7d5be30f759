"""Grouped product on GPUs without kernels: tiles of rows, each with its own matrix.

The length of a loop over a group's rows depends on the routing, so XLA would run it
from the host, a product at a time. Here the number of tiles follows from the shapes,
and the products of many tiles are one batched product. That costs a copy of a matrix
for each of its tiles and rows of padding: with tiles of half the mean group, at most
three copies of all matrices and the products of one and a half to two times the rows.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import varying
from pallas_kernels.grouped_matmul import gradients, reference, tile_table

MIN_ROWS = 16  # of a tile: the rows of a tensor core's product
COPIED_BYTES = 2**28  # of matrices, or of sums of their gradients, at a time


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """Returns a power of two from half the mean group size on, at least MIN_ROWS."""
    half = max(num_rows // (2 * num_groups), 1)
    return max(MIN_ROWS, 1 << (half - 1).bit_length())


def _chunked(
    table: Int[Array, "3 tiles"], matrix_bytes: int
) -> Int[Array, "chunks 3 chunk"]:
    """Cuts the tiles into chunks; the last one is filled with tiles without rows."""
    count = table.shape[1]
    chunk = min(max(COPIED_BYTES // matrix_bytes, 1), count)
    table = jnp.pad(table, ((0, 0), (0, -count % chunk)))
    return jnp.moveaxis(table.reshape(3, -1, chunk), 1, 0)


def _rows_of(
    x: Float[Array, "M D"],
    start: Int[Array, " chunk"],
    end: Int[Array, " chunk"],
    size: int,
) -> Float[Array, "chunk rows D"]:
    """Gathers the rows of tiles, with zeros from a tile's end on."""
    row = start[:, None] + jnp.arange(size)[None]
    rows = x[jnp.minimum(row, len(x) - 1)]
    return jnp.where((row < end[:, None])[..., None], rows, 0)


def _rows_times_matrix(
    x: Array, w: Array, scales: Array | None, group_sizes: Array, transposed: bool
) -> Array:
    """Multiplies all tiles of a chunk at once, then finds each row in its tile."""
    num_rows, num_groups = x.shape[0], w.shape[0]
    size = _tile_rows(num_rows, num_groups)
    table = tile_table.make(group_sizes, num_rows, size)
    formula = "crn,ckn->crk" if transposed else "crk,ckn->crn"

    def products(chunk: Int[Array, "3 chunk"]) -> Array:
        group, start, end = chunk
        group = jnp.minimum(group, num_groups - 1)  # its rows become zeros below
        matrix = w[group]
        if scales is not None:
            matrix = jax.vmap(reference.dequantized)(matrix, scales[group])
            matrix = matrix.astype(x.dtype)
        rows = _rows_of(x, start, end, size)
        return jnp.einsum(formula, rows, matrix, preferred_element_type=x.dtype)

    copied = math.prod(w.shape[1:]) * x.dtype.itemsize
    y = lax.map(products, _chunked(table, copied))
    y = y.reshape(-1, y.shape[-1])
    row = jnp.arange(num_rows, dtype=jnp.int32)
    tile = jnp.searchsorted(table[1], row, side="right").astype(jnp.int32) - 1
    is_mine = row < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(is_mine[:, None], y[tile * size + row - table[1][tile]], 0)


def _rows_times_rows(x: Array, dy: Array, group_sizes: Array) -> Float[Array, "E D F"]:
    """Sums x_e^T dy_e of all tiles of a group in float32.

    The order in which a GPU adds the tiles of a chunk is not fixed.
    """
    num_groups, shape = group_sizes.shape[0], (x.shape[1], dy.shape[1])
    size = _tile_rows(x.shape[0], num_groups)
    table = tile_table.make(group_sizes, x.shape[0], size)

    def add(dw: Array, chunk: Int[Array, "3 chunk"]) -> tuple[Array, None]:
        group, start, end = chunk
        parts = jnp.einsum(
            "crk,crn->ckn",
            _rows_of(x, start, end, size),
            _rows_of(dy, start, end, size),
            preferred_element_type=jnp.float32,
        )
        return dw.at[group].add(parts, mode="drop"), None  # group E has no matrix

    chunks = _chunked(table, 4 * math.prod(shape))
    zeros = varying.zeros((num_groups, *shape), jnp.float32, (x, dy, group_sizes))
    return lax.scan(add, zeros, chunks)[0]


grouped_matmul, grouped_matmul_quantized = gradients.differentiable(
    _rows_times_matrix, _rows_times_rows
)
