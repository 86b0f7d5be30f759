"""Dimension numbers: the dims of a parameter that are rows and columns, for Muon.

Muon makes the singular values of a matrix equal, but not those of its blocks: in one
wide matrix, a head with small gradients gets a small part of the update. Muon Split
makes each head's part of an up-projection a matrix of its own: each head then gets an
update of the same size.

An example: q_b_proj of stacked layers has the dims ("L", "Q", "N", "H"). Layers are
batch dims, which count matrices. A head dim merges with the dim after it.

    without the split   batch L      rows Q   cols N H   L matrices [Q, N H]
    with the split      batch L, N   rows Q   cols H     L N matrices [Q, H]
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_BATCH_DIMS = ("L", "E")  # layers and experts are never mixed
_ROUTER = ("D", "E")
_HEAD_DIMS = ("N", "I")  # a head dim and the dim after it belong together


@dataclasses.dataclass(frozen=True)
class DimensionNumbers:
    """The dims of an array that are the rows and the columns of its matrices.

    All other dims are batch dims: they count matrices, and Muon orthogonalises each
    matrix by itself. For a query projection (Q, N, H) with N heads:

        DimensionNumbers(rows=0, cols=(1, 2))   one matrix [Q, N H]
        DimensionNumbers(rows=0, cols=2)        N matrices [Q, H]: Muon Split

    A side of several dims is their product, in the given order. Negative numbers count
    from the last dim.
    """

    rows: int | tuple[int, ...]
    cols: int | tuple[int, ...]
    # (dim, index) at which an array of two fused weights is cut: H into P | R, or C+R
    # into C | R. Each part has its own matrices. None: one weight, as by default.
    cut: tuple[int, int] | None = None

    def layout(self, ndim: int) -> "Layout":
        """Returns the layout of an array with so many dims.

        Raises:
            ValueError: a dim does not exist, or is named twice.
        """
        sides = [(side,) if isinstance(side, int) else side for side in self._sides]
        named = [dim for side in sides for dim in side]
        found = [dim % ndim for dim in named if -ndim <= dim < ndim]
        if len(set(found)) < len(named) or not all(sides):
            raise ValueError(
                f"rows and cols must name different dims of an array with {ndim} dims, "
                f"got {self}."
            )
        rows, cols = (tuple(dim % ndim for dim in side) for side in sides)
        batch = tuple(dim for dim in range(ndim) if dim not in found)
        cut = self.cut and (self.cut[0] % ndim, self.cut[1])
        return Layout(batch, rows, cols, cut)

    @property
    def _sides(self) -> tuple[int | tuple[int, ...], int | tuple[int, ...]]:
        return self.rows, self.cols


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dims of one array that are batch, rows and columns of its matrices."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    cut: tuple[int, int] | None = None  # (dim, index) at which a fused weight is cut

    def split(self, x: Array) -> list[Array]:
        """Returns the matrices [..., rows, cols] of an array, or of its two parts."""
        if self.cut is None:
            return [self._matrices(x)]
        dim, index = self.cut
        return [self._matrices(part) for part in jnp.split(x, [index], dim)]

    def join(self, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """Returns the array of this shape whose matrices `split` returned."""
        whole = []
        for part, size in zip(parts, self.part_shapes(shape), strict=True):
            transposed = [size[dim] for dim in self._order]
            whole.append(part.reshape(transposed).transpose(np.argsort(self._order)))
        return whole[0] if self.cut is None else jnp.concatenate(whole, self.cut[0])

    def part_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns the shape of an array, or the shapes of its two parts."""
        if self.cut is None:
            return [shape]
        dim, index = self.cut
        sizes = (index, shape[dim] - index)
        return [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]

    def sides(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the number of rows and of columns of an array's matrices."""
        rows, cols = (
            math.prod(shape[dim] for dim in dims) for dims in (self.rows, self.cols)
        )
        return rows, cols

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch + self.rows + self.cols

    def _matrices(self, x: Array) -> Array:
        x = x.transpose(self._order)
        batch = x.shape[: len(self.batch)]
        rows = math.prod(x.shape[len(batch) :][: len(self.rows)])
        return x.reshape(*batch, rows, -1)


def stacked(x: Array, is_transposed: bool) -> Array:
    """Reshapes [..., rows, cols], or their transposes, to [matrices, rows, cols]."""
    x = x.mT if is_transposed else x
    return x.reshape(-1, *x.shape[-2:])


def unstacked(x: Array, is_transposed: bool, shape: tuple[int, ...]) -> Array:
    """Undoes `stacked` of an array of this shape."""
    *batch, rows, cols = shape
    if is_transposed:
        return x.reshape(*batch, cols, rows).mT
    return x.reshape(shape)


def from_names(
    names: tuple[str, ...], is_split: bool, cuts: Mapping[str, int]
) -> DimensionNumbers:
    """Returns which matrices one of GLM-5's parameters holds, by its dim names.

    Layers and experts are batch dims. A head dim merges with the dim after it: o_proj
    (N, O, D) is one matrix [N O, D], and wq_b (Q, I, J) is [Q, I J]. The paper splits
    the attention's up-projections (Q, N, H), (C, N, P) and (C, N, O) only: those whose
    columns begin with the heads N.

    Args:
        names: logical dim names, see glm5_jax/shapes.py.
        is_split: whether the heads of up-projections are a batch dim (Muon Split).
        cuts: dim name -> index at which it is cut into two matrices; empty in GLM-5.
            {"C+R": C} is optim.muon_split_kv_a.
    """
    is_router = names[-2:] == _ROUTER  # experts are the columns of one matrix
    batch = [
        dim
        for dim, name in enumerate(names)
        if name in _BATCH_DIMS and not (is_router and name == "E")
    ]
    rows, cols = _rows_and_cols(names, batch)
    if is_split and names[cols[0]] == "N" and len(cols) == 2:
        cols = cols[1:]  # dims that are neither rows nor cols are batch dims: now N too
    cut = [(names.index(dim), index) for dim, index in cuts.items() if dim in names]
    return DimensionNumbers(tuple(rows), tuple(cols), cut[0] if cut else None)


def _rows_and_cols(
    names: tuple[str, ...], batch: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Returns the dims of the rows and of the columns.

    Walks the dims from left to right, batch dims aside. A dim after a head dim joins
    its side, any other starts a new side: (Q, N, H) has the sides (Q), (N, H).

    Raises:
        ValueError: the names are not those of a stack of matrices.
    """
    sides: list[list[int]] = []
    for dim in sorted(set(range(len(names))) - set(batch)):
        if sides and names[sides[-1][-1]] in _HEAD_DIMS:
            sides[-1].append(dim)
        else:
            sides.append([dim])
    if len(sides) != 2:
        raise ValueError(f"Muon needs matrices, got a parameter with dims {names}.")
    return sides[0], sides[1]
