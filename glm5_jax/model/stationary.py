"""Multiplies few rows by a matrix whose parts stay on their devices.

Training gathers a matrix before it is used (`collectives.fetched`), because a device
has thousands of rows for it. In decoding a device has a few rows, and sending them to
the parts of the matrix, and sums or columns back, takes far fewer bytes: GLM-5's
q_a_proj has 24 MiB, a row of its input 12 KiB.

A device on axes that cut the matrix's input dim has some of its rows. It receives these
columns of all devices' x, and the products are summed over the devices. On axes that
cut the output dim it has some columns, receives x whole, and sends its columns of the
product back.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from glm5_jax import collectives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stationary:
    """A matrix as it is stored: `part` on this device, and the dims of the whole."""

    part: Array
    dims: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    num_in: int = dataclasses.field(metadata={"static": True})

    @property
    def axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the mesh axes that cut the first input dim, and first output dim."""
        axes = collectives.fetched_axes(self.dims)
        return axes[0], axes[self.num_in]


def pays(
    part: Array | jax.ShapeDtypeStruct,
    dims: tuple[str, ...],
    num_in: int,
    num_rows: int,
) -> bool:
    """Returns whether sending rows to a matrix takes fewer bytes than gathering it.

    Args:
      part: of the matrix, on this device.
      dims: of the matrix; mesh axes must cut no input or output dim but the first.
      num_in: input dims of the matrix, which come first; 0: it is no matrix.
      num_rows: rows of this device.
    """
    axes = collectives.fetched_axes(dims)
    num_parts = collectives.size([axis for cut in axes for axis in cut])
    if num_in == 0 or num_parts == 1 or not _are_first(axes, num_in):
        return False
    num_inside, num_outside = (collectives.size(axes[i]) for i in (0, num_in))
    width_in = math.prod(part.shape[:num_in]) * num_inside
    width_out = math.prod(part.shape[num_in:]) * num_outside
    rows = num_rows * num_outside
    size = part.dtype.itemsize
    sent = (num_outside - 1) * num_rows * width_in * size  # gathered
    sent += rows * width_in * size  # exchanged
    sent += num_inside * rows * width_out // num_outside * 4  # summed in float32
    sent += rows * width_out // num_outside * size
    return sent < (num_parts - 1) * part.size * size


def linear(
    x: Float[Array, "*input"],
    w: Stationary,
    product: Callable[[Array, Array], Array],
) -> Float[Array, "*output"]:
    """Contracts the last dims of x with the first of w, as `layers.linear` does.

    Args:
      x: rows of this device.
      w: the matrix.
      product: of rows [t, input] and a part, in float32.
    """
    free, dtype = x.shape[: x.ndim - w.num_in], x.dtype
    inside, outside = w.axes
    rows = x.reshape(math.prod(free), -1)
    rows = collectives.gather(rows, outside, 0)
    rows = collectives.exchange(rows, inside, split=1, joined=0)
    shape = w.part.shape
    part = w.part.reshape(math.prod(shape[: w.num_in]), -1)
    y = collectives.scatter_sum(product(rows, part), inside, 0).astype(dtype)
    y = collectives.exchange(y, outside, split=0, joined=1)
    heads = shape[w.num_in] * collectives.size(outside), *shape[w.num_in + 1 :]
    return y.reshape(*free, *heads)


def _are_first(axes: list[tuple[str, ...]], num_in: int) -> bool:
    """Returns whether no dims are cut but the first input and the first output."""
    others = (cut for i, cut in enumerate(axes) if i not in (0, num_in))
    return all(collectives.size(cut) == 1 for cut in others)
