"""Newton-Schulz: approximates the orthogonal matrix nearest to a given one.

For x = U diag(s) V^T this is U V^T: the same directions, all singular values 1. An odd
polynomial of x changes the singular values alone, so no SVD is needed: each of five
steps applies one polynomial, by three products of matrices. The values only come near
1: after the division by the Frobenius norm, the five polynomials of "polar_express"
take every s from 0.01 to 1 to between 0.97 and 1.04, before rounding. Those from 0.0025
to 0.01 come to at most 1.15, and smaller ones stay below 1.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Coefficients = Sequence[tuple[float, float, float]]  # (a, b, c) of each step
COEFFICIENTS: dict[str, Coefficients] = {
    # Jordan's quintic: the same polynomial every step.
    "quintic": ((3.4445, -4.7750, 2.0315),),
    # A polynomial for each step, in the manner of Polar Express (arXiv 2505.16932).
    # GLM-5's paper does not give its own; these numbers are those of xtuner, the
    # trainer of InternLM. The results are nearer to 1 than the quintic's.
    "polar_express": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
_NORM_EPS = 1e-8  # keeps a matrix without gradient at zero


def coefficients(name: str, num_steps: int) -> Coefficients:
    """Returns (a, b, c) of each step; the last entry of a list repeats.

    Raises:
        ValueError: there is no such polynomial.
    """
    if name not in COEFFICIENTS:
        raise ValueError(f"ns_coefficients must be of {set(COEFFICIENTS)}, got {name}.")
    steps = list(COEFFICIENTS[name])
    return (steps + steps[-1:] * num_steps)[:num_steps]


def orthogonalize(
    x: Float[Array, "*n rows columns"], steps: Coefficients, dtype: jax.typing.DTypeLike
) -> Float[Array, "*n rows columns"]:
    """Moves the singular values of every matrix towards 1, by Newton-Schulz.

    On accelerators all matrices iterate together, on a CPU one after another. Batch
    dims keep their shape, so that a sharded batch dim needs no communication.

    Args:
        x: a stack of matrices.
        steps: (a, b, c) of each step.
        dtype: of the iteration's products; norm and polynomial are at least float32.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    iterate = functools.partial(_iterate, steps=steps, dtype=dtype)
    one_by_one = functools.partial(_one_by_one, iterate)
    return lax.platform_dependent(x.astype(wide), cpu=one_by_one, default=iterate)


def _iterate(
    x: Float[Array, "*n rows columns"], steps: Coefficients, dtype: jax.typing.DTypeLike
) -> Float[Array, "*n rows columns"]:
    """Runs x <- a x + (b A + c A A) x with A = x x^T, from x / |x|_F on.

    If x has more rows than columns, its transpose iterates, for which A is smaller.
    """
    if x.shape[-2] > x.shape[-1]:
        return _iterate(x.mT, steps, dtype).mT
    # By default a chip would round the factors of float32 products.
    precision = None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST

    def step(x: Array, abc: Array) -> tuple[Array, None]:
        gram = jnp.matmul(x, x.mT, precision=precision)
        square = jnp.matmul(gram, gram, precision=precision)
        poly = (abc[1] * gram + abc[2] * square).astype(dtype)
        x = abc[0] * x + jnp.matmul(poly, x, precision=precision)
        return x.astype(dtype), None

    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    wide, x = x.dtype, (x / (norm + _NORM_EPS)).astype(dtype)
    return lax.scan(step, x, jnp.asarray(steps, wide))[0].astype(wide)


def _one_by_one(function: Callable[[Array], Array], x: Array) -> Array:
    """Maps over single matrices, since a CPU keeps one in cache (79 ms against 157)."""
    return lax.map(function, x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
