"""Rows of bytes in a TPU's VMEM, as numbers; see `latent_rows`.

The bytes of a scale, and of a number that was not rounded, lie in lanes side by side,
which vector units do not join. A product with zeros and ones moves them to one lane of
four planes, exactly: bfloat16 has every number of a byte.
"""

import functools
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from pallas_kernels import latent_rows
from pallas_kernels.sparse_mla import tpu_rows

LANES = tpu_rows.LANES
PLANES = 4  # bytes of a word of float32


def unsupported(form: latent_rows.Form) -> str | None:
    """Returns why rows cannot be restored, or None."""
    if form.kept + form.num_tiles > LANES:
        return (
            f"scales and numbers that are not rounded must be {LANES} at most, got "
            f"{form.num_tiles} and {form.kept}"
        )
    return None


def places(form: latent_rows.Form, width: int) -> Float[np.ndarray, "rest planes"]:
    """Returns what moves a row's bytes after its codes to their planes and lanes.

    The word of a number that was not rounded is that of float32; its lane is its place
    among them. Those of the scales follow.
    """
    rest = np.zeros((width - form.latent, PLANES, LANES), jnp.bfloat16)
    size = jnp.dtype(form.dtype).itemsize
    scales, kept = np.arange(form.num_tiles), np.arange(form.kept)
    for j in range(PLANES):
        rest[PLANES * scales + j, j, form.kept + scales] = 1
    for j in range(size):  # the word's upper bytes, if a number has two
        byte = form.kept_at - form.latent + size * kept + j
        rest[byte, PLANES - size + j, kept] = 1
    return rest.reshape(len(rest), -1)


def restored(
    rows: UInt8[Array, "n width"],
    places: Float[Array, "rest planes"],
    form: latent_rows.Form,
) -> tuple[Float[Array, "n C"], Float[Array, "n lanes"]]:
    """Returns the latents of rows, and their other numbers before zeros."""
    moved = rows[:, form.latent :].astype(jnp.int32).astype(jnp.float32)
    moved = tpu_rows.dot(moved.astype(jnp.bfloat16), places, 1, 0).astype(jnp.int32)
    planes = (moved[:, i * LANES : (i + 1) * LANES] << 8 * i for i in range(PLANES))
    words = functools.reduce(operator.or_, planes)
    words = lax.bitcast_convert_type(words, jnp.float32)
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    kept = jnp.where(lane < form.kept, words, 0).astype(form.dtype)
    codes, tiles = _numbers(rows[:, : form.latent], form), []
    for i in range(form.num_tiles):
        tile = codes[:, i * latent_rows.TILE : (i + 1) * latent_rows.TILE]
        scale = words[:, form.kept + i : form.kept + i + 1]
        tiles.append((tile * scale).astype(form.dtype))
    return jnp.concatenate(tiles, axis=1), kept


def _numbers(codes: UInt8[Array, "n C"], form: latent_rows.Form) -> Float[Array, "n C"]:
    """Returns codes as float32, by way of a type to which Mosaic converts them."""
    codes = lax.bitcast_convert_type(codes, jnp.dtype(form.codes))
    exact = jnp.int32 if form.codes == "int8" else jnp.bfloat16
    return codes.astype(exact).astype(jnp.float32)
