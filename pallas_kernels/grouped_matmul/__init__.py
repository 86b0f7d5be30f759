"""Rows of x in consecutive groups, each group times its own matrix."""

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch

IMPLEMENTATIONS = ("blocked", "ragged_dot", "gpu", "reference")


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
    # On TPU, XLA's own product does exactly the wanted work.
    is_tpu = implementation is None and dispatch.platform() == "tpu"
    name = "ragged_dot" if is_tpu else implementation
    args = (x, w, group_sizes)
    run = dispatch.choose("grouped_matmul", name, IMPLEMENTATIONS, *args)
    return run(*args)
