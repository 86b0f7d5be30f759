"""A token's row in the cache of MLA: as it is, or in 8 bits (model.kv_cache_dtype).

A rounded latent row is a row of bytes (pallas_kernels/latent_rows.py), which kernels
read as they are. Numbers that RoPE has turned stay in the model's dtype: their
rounding costs most, and they are few. GLM-5's row of 576 numbers takes 656 bytes
instead of 1,152.

A key of the indexer is rounded as a whole with "fp8" alone: from int8 keys an indexer
selects worse. Its codes and the power of two that scales them are two entries, 129
bytes instead of 256, which kernels read as they are.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from glm5_jax import config as config_lib
from glm5_jax.quantization import leaf
from pallas_kernels import dispatch, eight_bits, latent_rows

INDEX_KEYS, INDEX_EXPONENTS = "k_index", "k_index_exponents"  # names of entries
_LANES = 128  # of a TPU's tile


@dataclasses.dataclass(frozen=True)
class Rows:
    """The form of an entry's rows.

    Attributes:
      num_rounded: leading numbers of a row that are rounded.
      num_kept: the others, which stay as they are.
      kind: of the codes; None if nothing is rounded.
      dtype: of the numbers.
    """

    num_rounded: int
    num_kept: int
    kind: leaf.Kind | None
    dtype: jax.typing.DTypeLike

    @property
    def codes(self) -> str | None:
        """Returns the type of the codes, None if nothing is rounded."""
        return None if self.kind is None else jnp.dtype(leaf.DTYPES[self.kind]).name

    @property
    def byte_form(self) -> latent_rows.Form | None:
        """Returns the form of a row of bytes, None if nothing is rounded."""
        if self.codes is None:
            return None
        sizes = self.num_rounded, self.num_kept
        return latent_rows.Form(*sizes, self.codes, self.dtype)

    @property
    def num_numbers(self) -> int:
        """Returns the numbers of a restored row."""
        return _tiled(self.num_rounded + self.num_kept, dispatch.platform())

    @property
    def width(self) -> int:
        """Returns the elements of a row in the cache: numbers or bytes."""
        return self.entry(1).shape[-1]

    def entry(self, capacity: int, platform: str = "") -> jax.ShapeDtypeStruct:
        """Declares the rows of a sequence.

        Args:
          capacity: rows.
          platform: "cpu", "gpu" or "tpu"; "" for the one that a program is traced for.
        """
        form = self.byte_form
        size, dtype = self.num_rounded + self.num_kept, self.dtype
        if form is not None:
            size, dtype = form.width, jnp.uint8
        width = _tiled(size, platform or dispatch.platform())
        return jax.ShapeDtypeStruct((capacity, width), jnp.dtype(dtype))

    def store(self, x: Float[Array, "*n row"]) -> Shaped[Array, "*n width"]:
        """Returns the rows that are cached of these numbers."""
        form = self.byte_form
        if self.kind is None or form is None:
            return padded(x, self.width)
        latent, kept = jnp.split(x, [self.num_rounded], axis=-1)
        layout = leaf.Layout(self.kind, (latent_rows.TILE,))
        rounded = leaf.quantize(latent, layout)
        rows = form.joined(rounded.values, rounded.scales, kept)
        return padded(rows, self.width)

    def restore(self, rows: Shaped[Array, "*n width"]) -> Float[Array, "*n row"]:
        """Returns the numbers that cached rows stand for, zero-padded on a TPU."""
        form = self.byte_form
        return rows if form is None else padded(form.restored(rows), self.num_numbers)


def of_latents(config: config_lib.ModelConfig) -> Rows:
    """Returns the form of [latent | rotated key], C + R numbers."""
    return Rows(
        num_rounded=config.kv_lora_rank,
        num_kept=config.qk_rope_head_dim,
        kind=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        dtype=config.dtype,
    )


def index_entries(
    config: config_lib.ModelConfig, capacity: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Declares the indexer's keys of a sequence, J numbers each."""
    shape = capacity, config.index_head_dim
    if not has_index_codes(config):
        return {INDEX_KEYS: jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype))}
    return {
        # Bytes: XLA for CPUs would write float8 by way of a copy of all rows.
        INDEX_KEYS: jax.ShapeDtypeStruct(shape, jnp.uint8),
        INDEX_EXPONENTS: jax.ShapeDtypeStruct(shape[:1], jnp.int8),
    }


def has_index_codes(config: config_lib.ModelConfig) -> bool:
    """Returns whether keys of the indexer are cached in 8 bits."""
    return "fp8" in (config.kv_cache_dtype, config.index_dtype)


def of_index_keys(
    config: config_lib.ModelConfig, k: Float[Array, "*n J"]
) -> dict[str, Shaped[Array, "*n"] | Shaped[Array, "*n J"]]:
    """Returns what `index_entries` declares of these keys."""
    if not has_index_codes(config):
        return {INDEX_KEYS: k}
    codes, exponents = eight_bits.rounded(k)
    return {
        INDEX_KEYS: lax.bitcast_convert_type(codes, jnp.uint8),
        INDEX_EXPONENTS: exponents,
    }


def padded(x: Shaped[Array, "*n row"], size: int) -> Shaped[Array, "*n width"]:
    """Zero-pads the last axis."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _tiled(size: int, platform: str) -> int:
    """Rounds up to whole tiles on a TPU.

    XLA would give an argument with other rows another layout to save their padding, and
    a program would change it back, which takes twice the cache's memory: 1.12 GiB for 4
    layers of GLM-5.
    """
    return -(-size // _LANES) * _LANES if platform == "tpu" else size
