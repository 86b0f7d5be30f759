"""A weight matrix as codes and scales: how it is rounded, and what it stands for.

    scale = max |w| / largest code       of the weights that share the scale
    code = round(w / scale)              to the nearest, ties to even
    w' = code * scale                    in float32, then rounded to the dtype wanted

int8 and int4 codes are integers up to 127 and 7, two int4 codes make a byte; fp8 codes
are e4m3 numbers up to 448. `quantize` is the only code that rounds: a conversion, the
rollouts' copy and quantization-aware training get the same bits from it. Divisions are
written as products with reciprocals, which every compiler rounds in the same way.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Kind = Literal["int8", "fp8", "int4"]
Activations = Literal["same", "int8"]
LARGEST: dict[str, int] = {"int8": 127, "fp8": 448, "int4": 7}
DTYPES: dict[str, Any] = {
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
    "int4": jnp.uint8,  # two codes a byte
}
WHOLE = 0  # a block as long as its dim
TINY = float(np.finfo(np.float32).tiny)  # smaller numbers are flushed to zero


@dataclasses.dataclass(frozen=True)
class Layout:
    """The meaning of a matrix's codes; the same for all layers and experts of a stack.

    Attributes:
      kind: of the codes.
      blocks: how many weights along each dim of the matrix share a scale; WHOLE: all.
      num_in: leading dims of the matrix that a product sums over; the rest are outputs.
      activations: "int8" rounds each row of the other factor too, so that the product
        is one of integers.
    """

    kind: Kind
    blocks: tuple[int, ...]
    num_in: int = 1
    activations: Activations = "same"

    @property
    def packed_axis(self) -> int | None:
        """Returns the axis, from the end, along which two codes make a byte."""
        return -len(self.blocks) if self.kind == "int4" else None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["layout"],
)
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix, or a stack of matrices [layers, experts, ...], as codes and scales.

    A tree may hold anything in place of the arrays, such as their shapes.
    """

    values: Any  # codes; int4: bytes, with half as many along the packed axis
    scales: Any  # float32, one a block, with as many dims as the values
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the weights."""
        shape = [*self.values.shape]
        if self.layout.packed_axis is not None:
            shape[self.layout.packed_axis] *= 2
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Returns the number of dims of the weights."""
        return self.values.ndim


def quantize(weights: Float[Array, "*n"], layout: Layout) -> Quantized:
    """Rounds weights; each block gets the scale with which its largest is a code."""
    weights = weights.astype(jnp.float32)
    largest = _largest(jnp.abs(weights), layout)
    scales = largest * np.float32(1 / LARGEST[layout.kind])
    scales = jnp.where(largest > 0, jnp.maximum(scales, TINY), 1)
    return Quantized(with_scales(weights, scales, layout), scales, layout)


compiled_quantize = jax.jit(quantize, static_argnums=1)  # the same bits, sooner


def with_scales(
    weights: Float[Array, "*n"], scales: Float[Array, "*blocks"], layout: Layout
) -> Array:
    """Returns the nearest codes for given scales."""
    ratios = weights * expanded(1 / scales, weights.shape, layout)
    if layout.kind == "fp8":
        most = LARGEST["fp8"]
        return jnp.clip(ratios, -most, most).astype(jnp.float8_e4m3fn)
    most = LARGEST[layout.kind]
    codes = jnp.clip(jnp.round(ratios), -most, most).astype(jnp.int8)
    return packed(codes, layout) if layout.kind == "int4" else codes


def dequantized(weights: Quantized, dtype: Any) -> Float[Array, "*n"]:
    """Returns the weights that codes and scales stand for."""
    codes = unpacked(weights).values.astype(jnp.float32)
    scales = expanded(weights.scales, codes.shape, weights.layout)
    return (codes * scales).astype(dtype)


def packed(codes: Array, layout: Layout) -> Array:
    """Joins neighbouring codes along the packed axis: the first in the lower bits."""
    axis = codes.ndim + (layout.packed_axis or 0)
    size = codes.shape[axis] // 2
    shape = (*codes.shape[:axis], size, 2, *codes.shape[axis + 1 :])
    pairs = jnp.moveaxis(codes.reshape(shape), axis + 1, 0).astype(jnp.uint8)
    return (pairs[0] & 15) | (pairs[1] << 4)


def unpacked(weights: Quantized) -> Quantized:
    """Returns the weights with each int4 code in a byte of its own, as int8."""
    layout = weights.layout
    if layout.packed_axis is None:
        return weights
    values = weights.values
    axis = values.ndim + layout.packed_axis
    low = (values << 4).astype(jnp.int8) >> 4  # the shift of a signed byte keeps signs
    high = values.astype(jnp.int8) >> 4
    codes = jnp.stack([low, high], axis=axis + 1).reshape(weights.shape)
    return Quantized(codes, weights.scales, dataclasses.replace(layout, kind="int8"))


def expanded(
    scales: Float[Array, "*blocks"], shape: tuple[int, ...], layout: Layout
) -> Float[Array, "*n"]:
    """Repeats scales for the weights of their blocks; broadcasts over whole dims."""
    first = len(shape) - len(layout.blocks)
    for axis, block in enumerate(layout.blocks, first):
        if block > 1:
            scales = jnp.repeat(scales, block, axis)
            scales = jax.lax.slice_in_dim(scales, 0, shape[axis], axis=axis)
    return scales


def scale_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Returns the shape of the scales of weights with this shape."""
    first = len(shape) - len(layout.blocks)
    sizes = zip(shape[first:], layout.blocks, strict=True)
    return shape[:first] + tuple(-(-n // b) if b else 1 for n, b in sizes)


def abstract(shape: tuple[int, ...], layout: Layout) -> Quantized:
    """Returns shapes and dtypes of a quantized matrix, without any array."""
    values = [*shape]
    if layout.packed_axis is not None:
        values[layout.packed_axis] //= 2
    kind = jnp.dtype(DTYPES[layout.kind])
    scales = jax.ShapeDtypeStruct(scale_shape(shape, layout), jnp.float32)
    return Quantized(jax.ShapeDtypeStruct(tuple(values), kind), scales, layout)


def is_quantized(node: Any) -> bool:
    """Returns whether a node of a tree is a quantized matrix."""
    return isinstance(node, Quantized)


def to_dicts(tree: Any) -> Any:
    """Returns a tree of dicts alone: a quantized matrix is one of values and scales."""

    def one(node: Any) -> Any:
        if not is_quantized(node):
            return node
        return {"values": node.values, "scales": node.scales}

    return jax.tree.map(one, tree, is_leaf=is_quantized)


def from_dicts(like: Any, dicts: Any) -> Any:
    """Returns the tree that `to_dicts` made dicts of, with the layouts of `like`."""

    def one(node: Any, found: Any) -> Any:
        return Quantized(**found, layout=node.layout) if is_quantized(node) else found

    return jax.tree.map(one, like, dicts, is_leaf=is_quantized)


def _largest(sizes: Float[Array, "*n"], layout: Layout) -> Float[Array, "*blocks"]:
    """Returns the largest of each block; the last block of a dim may be smaller."""
    first = sizes.ndim - len(layout.blocks)
    for axis, block in enumerate(layout.blocks, first):
        if block == 1:
            continue
        n = sizes.shape[axis]
        size = block or max(n, 1)
        padding = [(0, 0)] * sizes.ndim
        padding[axis] = (0, -n % size)
        sizes = jnp.pad(sizes, padding)
        shape = (*sizes.shape[:axis], -1, size, *sizes.shape[axis + 1 :])
        sizes = jnp.max(sizes.reshape(shape), axis=axis + 1)
    return sizes
