"""A selection as words of 32 neighbouring keys, [B, w, P], as the kernels read it.

In this layout a block of 64 keys is two words per query, and the words of a tile's
queries lie side by side. In the layout of `pallas_kernels.selection` it would be 64
words per query. P is T padded with zeros to whole query tiles, so that no load needs a
mask.
"""

import typing

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, UInt32

from pallas_kernels import selection, triton_call

KEYS = 32  # per word
QUERIES = 64  # per program
TILE = 128  # queries of the largest tile of a kernel


def padded(x: Array) -> Array:
    """Pads T, the last axis, with zeros to P."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % TILE)])


def row_words(
    selected: Array | None, num_keys: int, interpret: bool
) -> UInt32[Array, "B words padded_queries"] | None:
    """Repacks a mask or bits: key s is bit s % 32 of word s // 32, in whole runs."""
    if selected is None:
        return None
    if selected.dtype == bool:
        mask = jnp.pad(selected, ((0, 0), (0, -num_keys % selection.RUN), (0, 0)))
        words = mask.reshape(mask.shape[0], -1, KEYS, mask.shape[-1])
        shifts = jnp.arange(KEYS, dtype=jnp.uint32)[None, None, :, None]
        words = words.astype(jnp.uint32) << shifts
        return padded(jnp.sum(words, axis=2, dtype=jnp.uint32))
    batch, num_queries, num_words = selected.shape
    pitch = triton.cdiv(num_queries, TILE) * TILE
    [words] = triton_call.call(
        _words_kernel,
        selected,
        out_shape=[jax.ShapeDtypeStruct((batch, num_words, pitch), jnp.uint32)],
        grid=(pitch // QUERIES, num_words // selection.LANES, batch),
        interpret=interpret,
        **{"T": num_queries, "P": pitch, "W": num_words, "LANES": selection.LANES},
        **{"BM": QUERIES, "KEYS": KEYS},
    )
    return words


@triton.jit
@typing.no_type_check
def _words_kernel(
    bits, words,
    T: tl.constexpr, P: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
    BM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Repacks a run of keys of a query tile: bit j of 128 lanes gives four words."""
    run, batch = tl.program_id(1) * LANES, tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    lanes = tl.arange(0, LANES)
    at = bits + (batch * T + rows[:, None]) * W + (run + lanes)[None, :]
    tile = tl.load(at, mask=(rows < T)[:, None], other=0)
    shifts = (lanes % KEYS).to(tl.uint32)[None, :]
    groups = tl.arange(0, LANES // KEYS)[None, :]
    words += batch * (P * W) + rows[:, None]
    for j in range(KEYS):
        shifted = ((tile >> j) & 1) << shifts
        sums = tl.sum(tl.reshape(shifted, (BM, LANES // KEYS, KEYS)), axis=2)
        place = run + j * (LANES // KEYS) + groups
        tl.store(words + place.to(tl.int64) * P, sums)
