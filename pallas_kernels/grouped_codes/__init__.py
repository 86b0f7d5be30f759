"""Multiplies consecutive groups of rows, each group by a matrix of codes and scales."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int, Int8, UInt8

from pallas_kernels import contract, dispatch

IMPLEMENTATIONS = ("reference", "tpu")
_OP = dispatch.Op("grouped_codes", "grouped_codes", IMPLEMENTATIONS)


def grouped_codes(
    x: Float[Array, "M D"] | Int8[Array, "M D"],
    codes: Float8e4m3fn[Array, "matrices stored F"]
    | Int8[Array, "matrices stored F"]
    | UInt8[Array, "matrices stored F"],
    scales: Float32[Array, "some blocks F"],
    group_sizes: Int[Array, " E"],
    first: Int[Array, ""] | int = 0,
    *,
    implementation: str | None = None,
) -> Float[Array, "M F"]:
    """Multiplies the rows of group e by matrix first + e; no gradients.

    With D inputs in blocks of D / blocks, of which each column has a scale:

        y[m, f] = sum_b scales[e, b, f] sum_(d in b) x[m, d] codes[e, d, f]

    The inner sums are in float32, or of integers where x has int8 codes. The matrices
    of a stack that no group uses, such as those of other layers, are not read.

    Args:
      x: rows sorted by group.
      codes: float8_e4m3fn, int8; or uint8, where a byte holds the int4 codes of inputs
        2 d (the lower bits) and 2 d + 1.
      scales: of all G matrices, or of those of the E groups alone.
      group_sizes: rows of each of up to G groups. Rows after the last group give
        zeros; groups are cut where the M rows end.
      first: matrix of the first group; clamped, so that all groups have a matrix.
      implementation: "tpu" (for as many rows as fit VMEM), "reference", or None.

    Returns:
      y, in the type of x; float32 for int8 codes.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    first = jnp.asarray(first)
    _check(x, codes, scales, group_sizes, first)
    group_sizes = contract.groups(group_sizes, x.shape[0])
    first = jnp.clip(first.astype(jnp.int32), 0, len(codes) - len(group_sizes))
    return dispatch.run(_OP, implementation, (x, codes, scales, group_sizes, first))


def _check(
    x: Array, codes: Array, scales: Array, group_sizes: Array, first: Array
) -> None:
    """Checks that the arrays have shapes and types that fit each other.

    Raises:
      ValueError: if they have not.
    """
    floats = {"scales": (scales, "some blocks F")}
    eight_bits, in_bytes = {}, {}
    (eight_bits if x.dtype == jnp.int8 else floats)["x"] = x, "M D"
    is_packed = codes.dtype == jnp.uint8
    (in_bytes if is_packed else eight_bits)["codes"] = codes, "G stored F"
    integers = {"group_sizes": (group_sizes, "E"), "first": (first, "")}
    known = contract.sizes("grouped_codes", floats, integers, eight_bits, in_bytes)
    contract.positive("grouped_codes", blocks=known["blocks"])
    if x.dtype == jnp.int8 and codes.dtype == jnp.float8_e4m3fn:
        raise ValueError(
            "grouped_codes: int8 rows meet integer codes, got float8_e4m3fn."
        )
    if not 1 <= known["E"] <= known["G"]:
        raise ValueError(
            f"grouped_codes: group_sizes must be of 1 .. {known['G']} groups, as many "
            f"as codes has matrices, got {known['E']}."
        )
    per_byte, (depth, width) = 1 + is_packed, (known["D"], known["F"])
    if per_byte * codes.shape[1] != depth:
        raise ValueError(
            f"grouped_codes: codes must be [G, {depth // per_byte}, {width}] for rows "
            f"of {depth} inputs and scales [g, blocks, {width}], got "
            f"{list(codes.shape)} and {list(scales.shape)}."
        )
    block = depth // scales.shape[1]
    if depth % scales.shape[1] or block % per_byte:
        raise ValueError(
            f"grouped_codes: blocks must divide {depth} inputs into whole bytes, got "
            f"{scales.shape[1]}."
        )
    if scales.shape[0] not in (codes.shape[0], len(group_sizes)):
        raise ValueError(
            f"grouped_codes: scales must be of all {codes.shape[0]} matrices or of the "
            f"{len(group_sizes)} groups, got {scales.shape[0]}."
        )


def takes_grouped_codes(
    x: Array, codes: Array, scales: Array, group_sizes: Array, first: Array | int
) -> bool:
    """Returns whether the platform has a kernel of `grouped_codes` for these."""
    name = dispatch.platform()
    if name not in IMPLEMENTATIONS:
        return False
    arguments = x, codes, scales, group_sizes, jnp.asarray(first, jnp.int32)
    return _OP.unsupported(name, arguments) is None
