"""Rows of float8_e4m3fn, each with a power of two that scales it.

A code has 4 bits of mantissa with the hidden one, so that code times power of two is
exact in bfloat16: a kernel that multiplies codes and one that multiplies restored rows
compute the same products. DeepSeek's indexers have keys and queries of this form
(DeepSeek-V3.2, arXiv 2512.02556; "ue8m0" names the scale).
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

MOST = 448.0  # the largest code
LEAST = -100  # exponent: the least code times its power is a normal number of bfloat16


def rounded(
    x: Float[Array, "*n J"],
) -> tuple[Float[Array, "*n J"], Int[Array, "*n"]]:
    """Returns codes of rows, and the int8 exponents of the rows' factors.

    The factor is the least power of two from 2**-100 on that fits the row's largest
    number, 448 times the factor at most. Numbers of 2**-10 factors or less become zero.
    """
    x = x.astype(jnp.float32)
    mantissa, exponent = jnp.frexp(jnp.max(jnp.abs(x), axis=-1) / MOST)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)  # a power of two fits
    exponent = jnp.maximum(exponent, LEAST)
    codes = x * power(-exponent)[..., None]
    return codes.astype(jnp.float8_e4m3fn), exponent.astype(jnp.int8)


def restored(
    codes: Float[Array, "*n J"],
    exponents: Int[Array, "*n"],
    dtype: jnp.dtype | str = "bfloat16",
) -> Float[Array, "*n J"]:
    """Returns the numbers that codes stand for, below 2**127 exact in bfloat16."""
    numbers = codes.astype(jnp.float32) * power(exponents)[..., None]
    return numbers.astype(dtype)


def power(exponents: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns 2**exponents in float32, exactly; of -126 for lower ones."""
    return jnp.ldexp(jnp.float32(1), jnp.maximum(exponents, -126))


def are_codes(x: Array) -> bool:
    """Returns whether an array has codes, which need exponents."""
    return x.dtype == jnp.float8_e4m3fn


def of_bytes(x: Shaped[Array, "*n J"]) -> Shaped[Array, "*n J"]:
    """Returns the codes that uint8 stands for, and other arrays as they are."""
    is_bytes = x.dtype == jnp.uint8
    return lax.bitcast_convert_type(x, jnp.float8_e4m3fn) if is_bytes else x


def checked(op: str, q: Array, k: Array, exponents: Array | None) -> Array | None:
    """Returns the exponents of keys that are codes, None for other keys.

    Raises:
      ValueError: if queries, keys and exponents do not fit each other.
    """
    if not are_codes(k):
        if exponents is not None or are_codes(q):
            raise ValueError(
                f"{op}: k must be float8_e4m3fn if q is, or if there are k_exponents, "
                f"got {k.dtype}."
            )
        return None
    if q.dtype not in (jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"{op}: q must be float8_e4m3fn, bfloat16 or float32 beside k of "
            f"float8_e4m3fn, got {q.dtype}."
        )
    if exponents is None or exponents.shape != k.shape[:2]:
        got = "none" if exponents is None else str(list(exponents.shape))
        raise ValueError(
            f"{op}: k of float8_e4m3fn needs k_exponents {list(k.shape[:2])}, "
            f"got {got}."
        )
    if exponents.dtype != jnp.int8:
        raise ValueError(f"{op}: k_exponents must be int8, got {exponents.dtype}.")
    return exponents


def as_halves(q: Array, k: Array, exponents: Array) -> tuple[Array, Array]:
    """Returns q and restored k in a type that all kernels multiply."""
    dtype = "bfloat16" if are_codes(q) else q.dtype
    return q.astype(dtype), restored(k, exponents, dtype)
