"""The definition: multiplies each row by its own matrix, block by block of inputs."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_codes(
    x: Array,
    codes: Array,
    scales: Float[Array, "some blocks F"],
    group_sizes: Int[Array, " E"],
    first: Int[Array, ""],
) -> Float[Array, "M F"]:
    """See `pallas_kernels.grouped_codes`."""
    num_blocks, dtype = scales.shape[1], jnp.float32
    dtype_y = dtype if x.dtype == jnp.int8 else x.dtype
    rows = jnp.arange(x.shape[0])
    group = jnp.searchsorted(jnp.cumsum(group_sizes), rows, side="right")
    has_group = group < len(group_sizes)
    group = group * has_group
    own = scales[group + (first if len(scales) == len(codes) else 0)]
    matrices = unpacked(codes)[first + group].astype(dtype)
    blocks = x.astype(dtype).reshape(len(x), num_blocks, -1)
    matrices = matrices.reshape(len(x), num_blocks, -1, codes.shape[-1])
    sums = jnp.einsum("mbk,mbkf->mbf", blocks, matrices, precision="highest")
    y = jnp.sum(sums * own, axis=1)
    return jnp.where(has_group[:, None], y, 0).astype(dtype_y)


def unpacked(codes: Array) -> Array:
    """Returns int4 codes, two a byte, as int8; others as they are."""
    if codes.dtype != jnp.uint8:
        return codes
    low = (codes << 4).astype(jnp.int8) >> 4  # the shift of a signed byte keeps signs
    pairs = jnp.stack([low, codes.astype(jnp.int8) >> 4], axis=2)
    return pairs.reshape(len(codes), -1, codes.shape[2])
