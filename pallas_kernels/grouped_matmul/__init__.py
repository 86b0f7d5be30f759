"""Rows of x in consecutive groups, each group times its own matrix."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import blocked, reference

IMPLEMENTATIONS = ("blocked", "ragged_dot", "reference")


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Multiplies the rows of group e by w[e]; differentiable in x and w.

    Shapes do not depend on the routing, so new group sizes never recompile.

    Args:
      x: rows sorted by group.
      w: one matrix a group.
      group_sizes: rows of each group; sum <= M. Rows after the last group give zeros.
      implementation: "blocked" (CPU: loops over tiles of rows, no wasted product),
        "ragged_dot" (TPU: `jax.lax.ragged_dot`), "reference", or None for the best
        one of this platform.

    Raises:
      NotImplementedError: for an unknown implementation.
    """
    default = "blocked" if dispatch.platform() == "cpu" else "ragged_dot"
    name = dispatch.choose(implementation, default, IMPLEMENTATIONS)
    if name == "blocked":
        return blocked.grouped_matmul(x, w, group_sizes)
    if name == "ragged_dot":
        return jax.lax.ragged_dot(x, w, group_sizes)
    return reference.grouped_matmul(x, w, group_sizes)
