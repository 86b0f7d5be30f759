"""Products with quantized matrices: the only code that multiplies by codes.

Where activations stay as they are, the codes are multiplied out, a part of a matrix at
a time: the numbers are those of the rounded weights. With int8 activations each row x
gets a scale of its own, and the sum over k is one of integers, exact in int32:

    x' = round(x / s_x)    s_x = max |x| / 127
    y_n = s_x sum_groups scale_gn sum_k x'_k code_kn
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

import pallas_kernels
from glm5_jax.quantization import leaf
from pallas_kernels import dispatch

PART = 2**24  # weights that are multiplied out at a time: 64 MiB in float32
_TILE = 128  # rows of a group that are multiplied at a time
_MIN_TILE = 8
_KERNEL_BLOCKS = (128, 128)  # those of pallas_kernels.grouped_matmul_quantized


def dot(x: Float[Array, "*input"], weights: leaf.Quantized) -> Float[Array, "*output"]:
    """Contracts the last dims of x with the input dims of a matrix."""
    num_in = weights.layout.num_in
    free, outputs = x.shape[: x.ndim - num_in], weights.shape[num_in:]
    rows = x.reshape(-1, math.prod(weights.shape[:num_in]))
    if weights.layout.activations == "int8":
        y = _integer_dot(rows, weights)
    else:
        y = float_sums(rows, weights, x.dtype)
    return y.reshape(*free, *outputs)


def grouped(
    x: Float[Array, "M D"],
    weights: leaf.Quantized,
    group_sizes: Int[Array, " E"],
    layer: Int[Array, ""] | None = None,
) -> Float[Array, "M F"]:
    """Multiplies the rows of group e by matrix e, as pallas_kernels.grouped_matmul.

    Decoding on a TPU reads codes in a kernel, within the stack of all layers if need
    be. Elsewhere one matrix at a time is multiplied out, and only those of groups with
    rows.

    Args:
      x: rows sorted by group.
      weights: matrices, or a stack of them for each layer.
      group_sizes: rows of each group.
      layer: of a stack; None: there is none.
    """
    found = _by_kernel(x, weights, group_sizes, layer)
    if found is not None:
        return found
    if layer is not None:
        weights = jax.tree.map(lambda w: w[layer], weights)
    layout = weights.layout
    has_kernel = layout.kind in ("fp8", "int8") and layout.activations == "same"
    if has_kernel and layout.blocks == _KERNEL_BLOCKS:
        return pallas_kernels.grouped_matmul_quantized(
            x, weights.values, weights.scales, group_sizes
        )
    return _grouped_in_turn(x, weights, group_sizes)


def _by_kernel(
    x: Float[Array, "M D"],
    weights: leaf.Quantized,
    group_sizes: Int[Array, " E"],
    layer: Int[Array, ""] | None,
) -> Float[Array, "M F"] | None:
    """Returns the products by a kernel that reads codes; None if none can."""
    if dispatch.platform() != "tpu":
        return None
    layout, (depth, width) = weights.layout, weights.shape[-2:]
    first = 0 if layer is None else layer * len(group_sizes)
    scales = weights.scales
    if layout.blocks[1] != 1:  # a scale for several columns: few, so one for each
        scales = scales if layer is None else scales[layer]
        scales = leaf.expanded(
            scales, (*scales.shape[:-1], width), leaf.Layout("int8", layout.blocks[1:])
        )
    scales = scales.reshape(-1, *scales.shape[-2:])
    if (layout.blocks[0] or depth) * scales.shape[1] != depth:
        return None  # the last block is smaller
    rows, row_scales = x, None
    if layout.activations == "int8":
        rows, row_scales = rounded_rows(x)
    codes = weights.values.reshape(-1, *weights.values.shape[-2:])
    arguments = rows, codes, scales, group_sizes, first
    if not pallas_kernels.takes_grouped_codes(*arguments):
        return None
    y = pallas_kernels.grouped_codes(*arguments)
    return y if row_scales is None else (y * row_scales).astype(x.dtype)


def _grouped_in_turn(
    x: Float[Array, "M D"], weights: leaf.Quantized, group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """Multiplies out one matrix after another."""
    layout = weights.layout
    num_groups = weights.shape[0]
    half = x.shape[0] // (2 * num_groups)
    size = min(_TILE, max(_MIN_TILE, 1 << half.bit_length() >> 1))
    padded, ends = jnp.pad(x, ((0, size), (0, 0))), jnp.cumsum(group_sizes)

    def group(e: Array, out: Array) -> Array:
        own = leaf.unpacked(jax.tree.map(lambda w: w[e], weights))
        matrix = None
        if layout.activations == "same":
            matrix = leaf.dequantized(own, x.dtype)
        start = ends[e] - group_sizes[e]

        def tile(i: Array, out: Array) -> Array:
            row = start + i * size
            rows = lax.dynamic_slice_in_dim(padded, row, size)
            y = dot(rows, own) if matrix is None else rows @ matrix
            # Rows of the next groups are overwritten in their turn.
            return lax.dynamic_update_slice_in_dim(out, y, row, 0)

        return lax.fori_loop(0, (group_sizes[e] + size - 1) // size, tile, out)

    def unless_empty(e: Array, out: Array) -> Array:
        return lax.cond(group_sizes[e] > 0, group, lambda _, out: out, e, out)

    out = jnp.zeros((padded.shape[0], weights.shape[2]), x.dtype)
    out = lax.fori_loop(0, num_groups, unless_empty, out)[: x.shape[0]]
    is_grouped = jnp.arange(len(out)) < ends[-1]
    return jnp.where(is_grouped[:, None], out, 0)


def rounded_rows(
    x: Float[Array, "M n"],
) -> tuple[Int8[Array, "M n"], Float[Array, "M 1"]]:
    """Rounds each row to int8; returns codes and scales."""
    x = x.astype(jnp.float32)
    layout = leaf.Layout("int8", (1, leaf.WHOLE))
    rows = leaf.quantize(x, layout)
    return rows.values, rows.scales


def float_sums(
    x: Float[Array, "M n"], weights: leaf.Quantized, dtype: Any
) -> Float[Array, "M columns"]:
    """Multiplies by the weights that the codes stand for; the result is in `dtype`."""
    num_in = weights.layout.num_in
    num_parts = _num_parts(weights)

    def part(own: leaf.Quantized) -> Array:
        matrix = leaf.dequantized(own, x.dtype)
        matrix = matrix.reshape(x.shape[-1], -1)
        return jnp.matmul(x, matrix, preferred_element_type=dtype)

    if num_parts == 1:
        return part(weights)

    def cut(array: Array) -> Array:
        """Returns the parts of the first output dim."""
        if array.shape[num_in] == 1:  # a scale of them all
            return jnp.broadcast_to(array, (num_parts, *array.shape))
        shape = array.shape
        split = (*shape[:num_in], num_parts, -1, *shape[num_in + 1 :])
        return jnp.moveaxis(array.reshape(split), num_in, 0)

    out = lax.map(part, jax.tree.map(cut, weights))
    return jnp.moveaxis(out, 0, 1).reshape(len(x), -1)


def integer_sums(rows: Int8[Array, "M n"], weights: leaf.Quantized) -> Array:
    """Multiplies integers: sums in int32, to be finished by `scaled`.

    Where groups of the inputs have scales of their own, the sums are in float32.
    """
    own = leaf.unpacked(weights)
    codes = own.values.reshape(rows.shape[-1], -1)
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.int32)
    if not any(own.layout.blocks[: own.layout.num_in]):
        return product(rows, codes)
    scales = _column_scales(weights)
    num_groups = len(scales)
    groups = (
        rows.reshape(len(rows), num_groups, -1).swapaxes(0, 1),
        codes.reshape(num_groups, -1, codes.shape[-1]),
        scales[:, None],
    )

    def add(total: Array, group: tuple[Array, Array, Array]) -> tuple[Array, None]:
        rows, codes, scales = group
        return total + product(rows, codes).astype(jnp.float32) * scales, None

    zeros = jnp.zeros((len(rows), codes.shape[-1]), jnp.float32)
    return lax.scan(add, zeros, groups)[0]


def scaled(sums: Array, weights: leaf.Quantized) -> Float[Array, "M columns"]:
    """Multiplies the sums of `integer_sums` by the scales that they lack."""
    if sums.dtype == jnp.int32:
        return sums.astype(jnp.float32) * _column_scales(weights)
    return sums


def _integer_dot(x: Float[Array, "M n"], weights: leaf.Quantized) -> Array:
    """Multiplies integers, group by group of the inputs where each has its scales."""
    rows, row_scales = rounded_rows(x)
    y = scaled(integer_sums(rows, weights), weights)
    return (y * row_scales).astype(x.dtype)


def _column_scales(weights: leaf.Quantized) -> Float[Array, "groups columns"]:
    """Returns a scale for each column, and each group of inputs."""
    layout, shape = weights.layout, weights.shape
    num_in = layout.num_in
    is_whole = not any(layout.blocks[:num_in])
    block = layout.blocks[0]
    assert is_whole or (num_in == 1 and shape[0] % block == 0), layout
    outputs = leaf.Layout("int8", (1,) * num_in + layout.blocks[num_in:])
    scales = leaf.expanded(weights.scales, shape, outputs)
    full = (*weights.scales.shape[:num_in], *shape[num_in:])
    return jnp.broadcast_to(scales, full).reshape(-1, math.prod(shape[num_in:]))


def _num_parts(weights: leaf.Quantized) -> int:
    """Returns into how many parts the outputs are cut, in whole blocks."""
    size = weights.shape[weights.layout.num_in]
    block = weights.layout.blocks[weights.layout.num_in] or 1
    wanted = -(-math.prod(weights.shape) // PART)
    if size % block:
        return 1
    counts = (n for n in range(wanted, size // block + 1) if size // block % n == 0)
    return next(counts, 1)
