"""XLA's own grouped product: fast on TPU, E times the work on CPU and GPU."""

import jax
from jaxtyping import Array, Float, Int


def grouped_matmul(
    x: Float[Array, "M D"], w: Float[Array, "E D F"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_matmul`."""
    return jax.lax.ragged_dot(x, w, group_sizes).astype(x.dtype)
