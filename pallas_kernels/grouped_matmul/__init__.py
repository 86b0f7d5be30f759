"""Multiplies consecutive groups of rows, each group by its own matrix."""

from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int, Int8

from pallas_kernels import contract, dispatch
from pallas_kernels.grouped_matmul import reference

IMPLEMENTATIONS = ("blocked", "batched", "ragged_dot", "gpu", "reference")
QUANTIZED_IMPLEMENTATIONS = ("blocked", "batched", "gpu", "reference")


def grouped_matmul(
    x: Float[Array, "M D"],
    w: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M F"]:
    """Multiplies the rows of group e by w[e]; differentiable in x and w.

    Shapes do not depend on the routing, so new group sizes never recompile.

    Args:
      x: rows sorted by group.
      w: one matrix per group.
      group_sizes: rows of each group. Rows after the last group give zeros; groups
        are cut at the end of the M rows.
      implementation: "blocked" (CPU: loops over tiles of rows, no wasted product),
        "ragged_dot" (TPU: `jax.lax.ragged_dot`), "gpu" (Triton), "batched" (GPUs
        without Triton: all tiles at once), "reference", or None for the best one of
        this platform.

    Returns:
      The products, of the type of x.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    floats, integers = {"x": (x, "M D"), "w": (w, "E D F")}, (group_sizes, "E")
    contract.sizes("grouped_matmul", floats, {"group_sizes": integers})
    group_sizes = contract.groups(group_sizes, x.shape[0])
    # On TPU, XLA's own product wastes no work.
    is_tpu = implementation is None and dispatch.platform() == "tpu"
    name = "ragged_dot" if is_tpu else implementation
    op = dispatch.Op(
        "grouped_matmul", "grouped_matmul", IMPLEMENTATIONS, plain_on_gpu="batched"
    )
    return dispatch.run(op, name, (x, w, group_sizes))


def grouped_matmul_quantized(
    x: Float[Array, "M D"],
    w: Float8e4m3fn[Array, "E D F"] | Int8[Array, "E D F"],
    scales: Float32[Array, "E row_blocks column_blocks"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: str | None = None,
) -> Float[Array, "M F"]:
    """Multiplies the rows of group e by w[e] * scales[e]; differentiable only in x.

    Each block of 128 x 128 codes has a scale; the last blocks may be smaller. This is
    the layout of DeepSeek-V3's and GLM-5's FP8 checkpoints (arXiv 2412.19437, section
    3.3.2): the scales are their weight_scale_inv, transposed like the weight. The
    matrices are never converted to the type of x all at once: a kernel converts tile by
    tile, plain XLA one matrix at a time.

    Args:
      x: rows sorted by group.
      w: codes, float8_e4m3fn or int8.
      scales: row_blocks = ceil(D / 128), column_blocks = ceil(F / 128).
      group_sizes: rows of each group. Rows after the last group give zeros; groups
        are cut where the M rows end.
      implementation: "blocked" (CPU and TPU: a loop), "gpu" (Triton), "batched"
        (GPUs without Triton), "reference", or None for the best one of this platform.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    contract.sizes(
        "grouped_matmul_quantized",
        {"x": (x, "M D"), "scales": (scales, "E row_blocks column_blocks")},
        {"group_sizes": (group_sizes, "E")},
        {"w": (w, "E D F")},
    )
    group_sizes = contract.groups(group_sizes, x.shape[0])
    blocks = tuple(-(-size // reference.SCALE_BLOCK) for size in w.shape[1:])
    if scales.shape[1:] != blocks:
        raise ValueError(
            f"scales must be [{w.shape[0]}, {blocks[0]}, {blocks[1]}] for w "
            f"{w.shape}, got {scales.shape}: one a block of 128 x 128."
        )
    function, known = "grouped_matmul_quantized", QUANTIZED_IMPLEMENTATIONS
    op = dispatch.Op("grouped_matmul", function, known, plain_on_gpu="batched")
    return dispatch.run(op, implementation, (x, w, scales, group_sizes))
