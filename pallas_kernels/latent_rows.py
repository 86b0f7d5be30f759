"""Cached latent rows in 8 bits, as vLLM's fp8_ds_mla has them: rows of bytes.

    C codes | float32 scales, one for 128 codes | R numbers of q's type | padding

A number of the latent is its code times the scale of its tile, in float32, rounded to
q's type. The R numbers, which RoPE turned, are as they were. A row of 512 and 64
numbers takes 656 bytes instead of 1,152.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from pallas_kernels import contract

TILE = 128  # codes that share a scale


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a row.

    Attributes:
      latent: C, the codes.
      kept: R, the numbers that are not rounded.
      codes: type of the codes, of `contract.CODES`.
      dtype: of the other numbers.
    """

    latent: int
    kept: int
    codes: str
    dtype: jax.typing.DTypeLike

    @property
    def num_tiles(self) -> int:
        """Returns the scales of a row; the last may be that of fewer codes."""
        return -(-self.latent // TILE)

    @property
    def kept_at(self) -> int:
        """Returns the byte at which the numbers that are not rounded begin."""
        return self.latent + 4 * self.num_tiles

    @property
    def width(self) -> int:
        """Returns the bytes of a row without padding."""
        return self.kept_at + self.kept * jnp.dtype(self.dtype).itemsize

    def check_width(self, op: str, kv: Array) -> None:
        """Checks that rows hold all numbers.

        Raises:
          ValueError: if they are too short.
        """
        if kv.shape[-1] < self.width:
            raise ValueError(
                f"{op}: kv's last axis must have {self.width} bytes or more, "
                f"{self.latent} codes, {self.num_tiles} float32 scales and {self.kept} "
                f"numbers of q's {jnp.dtype(self.dtype).name}, got {kv.shape[-1]}; q "
                "must be as wide as a row's numbers, and of their type."
            )

    def joined(
        self,
        codes: Shaped[Array, "*n C"],
        scales: Float[Array, "*n tiles"],
        kept: Float[Array, "*n R"],
    ) -> UInt8[Array, "*n width"]:
        """Returns the bytes of rows."""
        parts = codes, scales, kept.astype(self.dtype)
        return jnp.concatenate([*map(_bytes, parts)], axis=-1)

    def restored(self, rows: UInt8[Array, "*n width"]) -> Float[Array, "*n row"]:
        """Returns the C + R numbers that rows stand for."""
        codes = _numbers(rows[..., : self.latent], self.codes)
        scales = _numbers(rows[..., self.latent : self.kept_at], jnp.float32)
        scales = jnp.repeat(scales, TILE, axis=-1)[..., : self.latent]
        latent = (codes.astype(jnp.float32) * scales).astype(self.dtype)
        kept = _numbers(rows[..., self.kept_at : self.width], self.dtype)
        return jnp.concatenate([latent, kept], axis=-1)


def form(
    op: str, q: Array, kv: Array, value_dim: int, kv_codes: str | None
) -> Form | None:
    """Returns the form of rows of bytes, None for rows of floats.

    Raises:
      ValueError: if rows and the type of their codes do not fit each other.
    """
    kinds = " or ".join(contract.CODES)
    if kv_codes is None:
        if kv.dtype == jnp.uint8:
            raise ValueError(
                f"{op}: kv of uint8 needs kv_codes, the type of its codes, {kinds}."
            )
        return None
    if kv_codes not in contract.CODES:
        raise ValueError(f"{op}: kv_codes must be {kinds}, got {kv_codes!r}.")
    if kv.dtype != jnp.uint8:
        raise ValueError(
            f"{op}: kv must be uint8, rows of bytes, beside kv_codes, got {kv.dtype}; "
            "leave kv_codes out for rows of floats."
        )
    return Form(value_dim, q.shape[-1] - value_dim, kv_codes, q.dtype)


def _bytes(x: Array) -> UInt8[Array, "*n bytes"]:
    """Returns the bytes of numbers, those of each together."""
    found, size = lax.bitcast_convert_type(x, jnp.uint8), x.dtype.itemsize
    return found.reshape(*x.shape[:-1], x.shape[-1] * size)


def _numbers(rows: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Returns the numbers of bytes."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        rows = rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)
    return lax.bitcast_convert_type(rows, jnp.dtype(dtype))
