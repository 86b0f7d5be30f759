"""The gradients of a grouped product in plain XLA: dx = dy w[e]^T, dw[e] = x^T dy."""

from collections.abc import Callable

import jax
from jaxtyping import Array

from pallas_kernels import dispatch


def differentiable(
    rows_times_matrix: Callable[..., Array], rows_times_rows: Callable[..., Array]
) -> tuple[Callable, Callable]:
    """Makes `grouped_matmul` and `grouped_matmul_quantized` of two products.

    Args:
      rows_times_matrix: of x [M, D], w [E, D, F], scales or None, group sizes and
        whether w is transposed, then x is [M, F]: the rows times their matrix.
      rows_times_rows: of x [M, D], dy [M, F] and group sizes: [E, D, F] in float32.
    """

    @jax.custom_vjp
    def grouped_matmul(x, w, group_sizes):  # noqa: ANN001, ANN202
        return rows_times_matrix(x, w, None, group_sizes, False)

    @jax.custom_vjp
    def grouped_matmul_quantized(x, w, scales, group_sizes):  # noqa: ANN001, ANN202
        return rows_times_matrix(x, w, scales, group_sizes, False)

    def forward(x, w, group_sizes):  # noqa: ANN001, ANN202
        y = dispatch.saved(grouped_matmul(x, w, group_sizes))
        return y, (x, w, group_sizes)

    def backward(residuals, dy):  # noqa: ANN001, ANN202
        x, w, group_sizes = residuals
        dx = rows_times_matrix(dy, w, None, group_sizes, True)
        return dx, rows_times_rows(x, dy, group_sizes).astype(w.dtype), None

    def quantized_forward(x, w, scales, group_sizes):  # noqa: ANN001, ANN202
        y = dispatch.saved(grouped_matmul_quantized(x, w, scales, group_sizes))
        return y, (w, scales, group_sizes)

    def quantized_backward(residuals, dy):  # noqa: ANN001, ANN202
        """The weights are constants."""
        w, scales, group_sizes = residuals
        return rows_times_matrix(dy, w, scales, group_sizes, True), None, None, None

    grouped_matmul.defvjp(forward, backward)
    grouped_matmul_quantized.defvjp(quantized_forward, quantized_backward)
    return grouped_matmul, grouped_matmul_quantized
