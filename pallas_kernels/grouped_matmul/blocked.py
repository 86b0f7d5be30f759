"""Grouped product on CPU: a loop over groups with an inner loop over tiles of rows.

The inner trip count follows the routing at run time, so only the last tile of a group
computes rows in excess: on average M + E * ROWS / 2 rows in all. `jax.lax.ragged_dot`
is a masked dense product on CPU and computes E * M rows. If there are few rows, tiles
are smaller.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import varying
from pallas_kernels.grouped_matmul import gradients, reference

ROWS = 128  # a tile of x, a matrix and the result stay in the L2 cache
MIN_ROWS = 8


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """Returns half the mean group size, as a power of two in MIN_ROWS .. ROWS."""
    half = num_rows // (2 * num_groups)
    return min(ROWS, max(MIN_ROWS, 1 << half.bit_length() >> 1))


def _tiles(group_sizes: Int[Array, " E"], e: Int[Array, ""], size: int) -> tuple:
    """Returns the first row, end and number of tiles of group e."""
    end = jnp.cumsum(group_sizes)[e]
    start = end - group_sizes[e]
    return start, end, (group_sizes[e] + size - 1) // size


def _tile(
    x: Float[Array, "M D"], row: Int[Array, ""], end: Int[Array, ""], size: int
) -> Array:
    """Returns rows row .. row + size - 1 of x, with zeros from `end` on."""
    tile = lax.dynamic_slice_in_dim(x, row, size)
    is_mine = row + jnp.arange(size) < end
    return jnp.where(is_mine[:, None], tile, 0)


def _rows_times_matrix(
    x: Array, w: Array, scales: Array | None, group_sizes: Array, transposed: bool
) -> Array:
    """Multiplies tile by tile; the next group overwrites rows after a group's end."""
    size = _tile_rows(len(x), len(w))
    padded = jnp.pad(x, ((0, size), (0, 0)))
    width = w.shape[1] if transposed else w.shape[2]
    formula = "mn,kn->mk" if transposed else "mk,kn->mn"
    product = functools.partial(jnp.einsum, formula, preferred_element_type=x.dtype)

    def group(e: Array, out: Array) -> Array:
        start, end, num_tiles = _tiles(group_sizes, e, size)
        matrix = None
        if scales is not None:
            matrix = reference.dequantized(w[e], scales[e]).astype(x.dtype)

        def tile(i: Array, out: Array) -> Array:
            row = start + i * size
            rows = _tile(padded, row, end, size)
            y = product(rows, w[e] if matrix is None else matrix)
            return lax.dynamic_update_slice_in_dim(out, y, row, 0)

        return lax.fori_loop(0, num_tiles, tile, out)

    def unless_empty(e: Array, out: Array) -> Array:
        return lax.cond(group_sizes[e] > 0, group, lambda _, out: out, e, out)

    # An empty group needs no matrix; only the conversion of codes would cost.
    step = group if scales is None else unless_empty
    out = varying.zeros((len(padded), width), x.dtype, (x, w, group_sizes))
    return lax.fori_loop(0, len(w), step, out)[: len(x)]


def _rows_times_rows(x: Array, dy: Array, group_sizes: Array) -> Array:
    """Computes dw[e] = x_e^T dy_e, summed in float32 over the tiles of group e."""
    size = _tile_rows(len(x), len(group_sizes))
    x = jnp.pad(x, ((0, size), (0, 0)))
    dy = jnp.pad(dy, ((0, size), (0, 0)))

    def group(e: Array) -> Array:
        start, end, num_tiles = _tiles(group_sizes, e, size)

        def tile(i: Array, dw: Array) -> Array:
            row = start + i * size
            dy_tile = lax.dynamic_slice_in_dim(dy, row, size)
            return dw + jnp.einsum(
                "mk,mn->kn",
                _tile(x, row, end, size),
                dy_tile,
                preferred_element_type=jnp.float32,
            )

        shape = (x.shape[1], dy.shape[1])
        zeros = varying.zeros(shape, jnp.float32, (x, dy, group_sizes))
        return lax.fori_loop(0, num_tiles, tile, zeros)

    return lax.map(group, jnp.arange(len(group_sizes)))


grouped_matmul, grouped_matmul_quantized = gradients.differentiable(
    _rows_times_matrix, _rows_times_rows
)
