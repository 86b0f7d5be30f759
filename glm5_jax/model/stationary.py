"""Multiplies few rows by a matrix whose parts stay on their devices.

Training gathers a matrix before it is used (`collectives.fetched`), because a device
has thousands of rows for it. In decoding a device has a few rows, and sending them to
the parts of the matrix, and sums or columns back, takes far fewer bytes: GLM-5's
q_a_proj has 24 MiB, a row of its input 12 KiB.

A device on axes that cut the matrix's input dim has some of its rows. It receives these
columns of all devices' x, and the products are summed over the devices. On axes that
cut the output dim it has some columns, receives x whole, and sends its columns of the
product back.

Of a quantized matrix, the codes stay and so do their scales. Where activations are
rounded to int8 too, a row is rounded before it is cut, by the largest number of the
whole row, and travels as codes; its sums of integers are exact on any number of
devices, and equal to those of the gathered matrix bit for bit.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from glm5_jax import collectives
from glm5_jax.quantization import leaf, products, shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stationary:
    """A matrix as it is stored: `part` on this device, and the dims of the whole."""

    part: Array | leaf.Quantized
    dims: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    num_in: int = dataclasses.field(metadata={"static": True})

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the mesh axes that cut the first input dim, and first output dim."""
        axes = collectives.fetched_axes(self.dims)
        return axes[0], axes[self.num_in]


def stored(
    part: Array | leaf.Quantized, dims: tuple[str, ...], num_in: int
) -> Stationary:
    """Returns the matrix of which a device stores a part."""
    if isinstance(part, leaf.Quantized):
        part = shards.local(part, dims)
    return Stationary(part, dims, num_in)


def pays(
    part: Any, dims: tuple[str, ...], num_in: int, num_rows: int, dtype: str
) -> bool:
    """Returns whether sending rows to a matrix takes fewer bytes than gathering it.

    Args:
      part: of the matrix, on this device: an array, a quantized matrix, or shapes.
      dims: of the matrix; mesh axes must cut no input or output dim but the first.
      num_in: input dims of the matrix, which come first; 0: it is no matrix.
      num_rows: rows of this device.
      dtype: of the rows.
    """
    axes = collectives.fetched_axes(dims)
    num_parts = collectives.size([axis for cut in axes for axis in cut])
    if num_in == 0 or num_parts == 1 or not _are_first(axes, num_in):
        return False
    codes = part.values if isinstance(part, leaf.Quantized) else part
    num_inside, num_outside = (collectives.size(axes[i]) for i in (0, num_in))
    width_in = math.prod(part.shape[:num_in]) * num_inside
    width_out = math.prod(part.shape[num_in:]) * num_outside
    rows, size = num_rows * num_outside, jnp.dtype(dtype).itemsize
    row_bytes = width_in * (1 if _is_integer(part) else size)
    sent = (num_outside - 1) * num_rows * row_bytes  # gathered
    sent += rows * row_bytes  # exchanged
    sent += num_inside * rows * width_out // num_outside * 4  # summed, 4 bytes a number
    sent += rows * width_out // num_outside * size
    return sent < (num_parts - 1) * codes.size * codes.dtype.itemsize


def linear(
    x: Float[Array, "*input"],
    w: Stationary,
    product: Callable[[Array, Array], Array],
) -> Float[Array, "*output"]:
    """Contracts the last dims of x with the first of w, as `layers.linear` does.

    Args:
      x: rows of this device.
      w: the matrix.
      product: of rows [t, input] and a part that is an array, in float32.
    """
    free, part = x.shape[: x.ndim - w.num_in], w.part
    inside, outside = w.axes
    rows, row_scales = x.reshape(math.prod(free), -1), None
    if _is_integer(part):
        rows, row_scales = products.rounded_rows(rows)
        row_scales = collectives.gather(row_scales, outside, 0)
    rows = collectives.gather(rows, outside, 0)
    rows = collectives.exchange(rows, inside, split=1, joined=0)
    if row_scales is not None:
        assert isinstance(part, leaf.Quantized)
        y = products.integer_sums(rows, part)
        y = collectives.scatter_sum(y, inside, 0)
        y = products.scaled(y, part) * row_scales
    else:
        y = collectives.scatter_sum(_float32(rows, w, product), inside, 0)
    y = collectives.exchange(y.astype(x.dtype), outside, split=0, joined=1)
    num_first = part.shape[w.num_in] * collectives.size(outside)
    return y.reshape(*free, num_first, *part.shape[w.num_in + 1 :])


def _float32(
    rows: Float[Array, "t input"], w: Stationary, product: Callable
) -> Float[Array, "t output"]:
    """Returns the product with this device's part."""
    part = w.part
    if isinstance(part, leaf.Quantized):
        return products.float_sums(rows, part, jnp.float32)
    return product(rows, part.reshape(math.prod(part.shape[: w.num_in]), -1))


def _is_integer(part: Any) -> bool:
    """Returns whether activations are rounded for this matrix."""
    is_quantized = isinstance(part, leaf.Quantized)
    return is_quantized and part.layout.activations == "int8"


def _are_first(axes: list[tuple[str, ...]], num_in: int) -> bool:
    """Returns whether no dims are cut but the first input and the first output."""
    others = (cut for i, cut in enumerate(axes) if i not in (0, num_in))
    return all(collectives.size(cut) == 1 for cut in others)
