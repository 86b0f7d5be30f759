"""Muon Split: momentum orthogonalised matrix by matrix, heads as matrices of their own.

    M <- mu M + G;   U = G + mu M (Nesterov) or M;   O = NS(U / |U|_F)
    W <- (1 - lr wd) W - lr * 0.2 sqrt(max(rows, cols)) * O

What a matrix is follows from the logical dim names of a parameter (`layout`). GLM-5
report, arXiv 2602.15763, section 2.1 (Muon Split); Jordan, Muon, 2024; Liu et al.,
arXiv 2502.16982 (update RMS); Amsel et al., arXiv 2505.16932 (Polar Express).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from glm5_jax import config as config_lib

Coefficients = Sequence[tuple[float, float, float]]  # (a, b, c) of each step
COEFFICIENTS: dict[str, Coefficients] = {
    # Jordan's quintic: the same polynomial every step.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # One polynomial a step, as in xtuner; tends to 1 instead of oscillating about it.
    "polar_express": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
_BATCH_DIMS = ("L", "E")  # layers and experts are never mixed
_ROUTER = ("D", "E")
_HEAD_DIMS = ("N", "I")  # heads belong to the dim after them
_NORM_EPS = 1e-8  # keeps a matrix without gradient at zero


@dataclasses.dataclass(frozen=True)
class Layout:
    """Axes of a parameter that are batch, rows and columns of its matrices."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    cut: tuple[int, int] | None = None  # (axis, index) where a fused weight is cut

    def map(self, function: Callable[[Array], Array], x: Array) -> Array:
        """Applies a function of [..., rows, cols] to the matrices of a parameter."""
        return self.join([function(part) for part in self.split(x)], x.shape)

    def split(self, x: Array) -> list[Array]:
        """Matrices [..., rows, cols] of a parameter, or of each of its two parts."""
        if self.cut is None:
            return [self._matrices(x)]
        axis, index = self.cut
        return [self._matrices(part) for part in jnp.split(x, [index], axis)]

    def join(self, parts: Sequence[Array], shape: tuple[int, ...]) -> Array:
        """The parameter of this shape that `split` has split."""
        whole = []
        for part, size in zip(parts, self.part_shapes(shape), strict=True):
            transposed = [size[axis] for axis in self._order]
            whole.append(part.reshape(transposed).transpose(np.argsort(self._order)))
        return whole[0] if self.cut is None else jnp.concatenate(whole, self.cut[0])

    def part_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shape of a parameter, or the shapes of its two parts."""
        if self.cut is None:
            return [shape]
        axis, index = self.cut
        sizes = (index, shape[axis] - index)
        return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]

    @property
    def _order(self) -> tuple[int, ...]:
        return self.batch + self.rows + self.cols

    def _matrices(self, x: Array) -> Array:
        x = x.transpose(self._order)
        batch = x.shape[: len(self.batch)]
        rows = math.prod(x.shape[len(batch) :][: len(self.rows)])
        return x.reshape(*batch, rows, -1)


def layout(
    dims: tuple[str, ...],
    config: config_lib.OptimConfig,
    model: config_lib.ModelConfig,
) -> Layout:
    """Reads off the dim names which matrices a parameter holds.

    Layers and experts are batch. A head dim merges with the dim after it, so o_proj
    (N, O, D) is one matrix [N O, D] and wq_b (Q, I, J) is [Q, I J]; but where it leads
    the columns of an up-projection of the attention (Q, N, H), (C, N, P), (C, N, O),
    `muon_split` makes it batch: one matrix a head. Without it those are [Q, N H],
    [C, N P] and [C, N O]: the key and value halves of kv_b_proj stay apart, whereas
    an unsplit Muon on the fused weight would orthogonalise them together.

    Raises:
        ValueError: the names are not those of a stack of matrices.
    """
    is_router = dims[-2:] == _ROUTER  # there experts are the columns of one matrix
    batch = [
        axis
        for axis, name in enumerate(dims)
        if name in _BATCH_DIMS and not (is_router and name == "E")
    ]
    sides: list[list[int]] = []
    for axis in sorted(set(range(len(dims))) - set(batch)):
        if sides and dims[sides[-1][-1]] in _HEAD_DIMS:
            sides[-1].append(axis)
        else:
            sides.append([axis])
    if len(sides) != 2:
        raise ValueError(f"Muon needs matrices, got a parameter with dims {dims}.")
    rows, cols = sides
    if config.muon_split and dims[cols[0]] == "N" and len(cols) == 2:
        batch.append(cols.pop(0))
    cut = None
    if config.muon_split_rope and "H" in dims:
        cut = (dims.index("H"), model.qk_nope_head_dim)
    if config.muon_split_kv_a and "C+R" in dims:
        cut = (dims.index("C+R"), model.kv_lora_rank)
    return Layout(tuple(batch), tuple(rows), tuple(cols), cut)


def coefficients(config: config_lib.OptimConfig) -> Coefficients:
    """Returns those of every Newton-Schulz step; the last entry of a list repeats."""
    steps = list(COEFFICIENTS[config.ns_coefficients])
    return (steps + steps[-1:] * config.ns_steps)[: config.ns_steps]


def orthogonalize(
    x: Float[Array, "*batch a b"], steps: Coefficients, dtype: jax.typing.DTypeLike
) -> Float[Array, "*batch a b"]:
    """Newton-Schulz: moves the singular values of every matrix towards 1.

    x <- x / |x|_F, then in each step x <- a x + (b A + c A A) x with A = x x^T, on
    the side where A is smaller. On accelerators all matrices iterate together and
    batch dims stay as they are, so that a sharded one stays local.

    Args:
        x: a stack of matrices.
        steps: (a, b, c) of each step.
        dtype: of the iteration's products; norm and polynomial are at least float32.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    precision = None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST

    def step(x: Array, abc: Array) -> tuple[Array, None]:
        gram = jnp.matmul(x, x.mT, precision=precision)
        square = jnp.matmul(gram, gram, precision=precision)
        poly = (abc[1] * gram + abc[2] * square).astype(dtype)
        x = abc[0] * x + jnp.matmul(poly, x, precision=precision)
        return x.astype(dtype), None

    def iterate(x: Array) -> Array:
        if x.shape[-2] > x.shape[-1]:
            return iterate(x.mT).mT
        norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
        x = (x / (norm + _NORM_EPS)).astype(dtype)
        return lax.scan(step, x, jnp.asarray(steps, wide))[0].astype(wide)

    one_by_one = functools.partial(_one_by_one, iterate)
    return lax.platform_dependent(x.astype(wide), cpu=one_by_one, default=iterate)


def _one_by_one(function: Callable[[Array], Array], x: Array) -> Array:
    """Maps over single matrices: on CPU each stays in cache (79 ms against 157)."""
    return lax.map(function, x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
