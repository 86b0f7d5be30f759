"""Selection tile by tile: no [T, S] array of scores, no sort.

The k-th largest score of a query is found by bisection on its bits: 32 counts over
a tile that lies in the cache, several times cheaper on CPU than `lax.top_k`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import tiles

LOWEST = jnp.iinfo(jnp.int32).min


def tile_scores(
    q: Float[Array, "I T J"], k: Float[Array, "S J"], w: Float[Array, "T I"]
) -> tuple[Float[Array, "S T"], Float[Array, "S I T"]]:
    """Scores of one tile, and the head products after their ReLU; keys first."""
    q, k, w = (x.astype(jnp.float32) for x in (q, k, w))
    dots = jax.nn.relu(jnp.einsum("sj,itj->sit", k, q))
    return jnp.sum(dots * w.T[None], axis=1), dots


def visible(lo: Int[Array, "T 1"], hi: Int[Array, "T 1"], keys: int) -> Array:
    """Which keys each query of a tile may see: [S, T]."""
    s = jnp.arange(keys)[:, None]
    return (s >= lo.T) & (s < hi.T)


def indexer_mask(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> Bool[Array, "B S T"]:
    """See `pallas_kernels.indexer_mask`."""
    num_keys = k.shape[1]

    def sequence(*queries_and_keys: Array) -> Array:
        queries, keys = queries_and_keys[:-1], queries_and_keys[-1]
        return tiles.over_tiles(tile, None, queries, keys, out_axis=-1)[1]

    def tile(_: None, queries: tuple, k: Array, mask: None) -> tuple[None, Array]:
        q, w, lo, hi = queries
        scores, _dots = tile_scores(q, k, w)
        mask_ST = topk_mask(scores, visible(lo, hi, k.shape[0]), topk)
        return None, jnp.pad(mask_ST, ((0, num_keys - k.shape[0]), (0, 0)))

    return tiles.over_sequences(
        sequence, q.swapaxes(1, 2), w, lo[..., None], hi[..., None], k
    )


def topk_mask(
    scores: Float[Array, "S T"], is_visible: Bool[Array, "S T"], topk: int
) -> Bool[Array, "S T"]:
    """The `topk` largest visible scores of every column, ties to the lower row."""
    keys = jnp.where(is_visible, _ordered_bits(scores), LOWEST)

    def count(threshold: Array) -> Array:
        return jnp.sum(keys >= threshold[None], axis=0, dtype=jnp.int32)

    def halve(_: Array, low_high: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = low_high  # count(low) >= topk > count(high), or low is the least
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # no overflow
        is_enough = count(middle) >= topk
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    least = jnp.full(scores.shape[1:], LOWEST + 1, jnp.int32)  # above what is hidden
    most = jnp.full(scores.shape[1:], jnp.iinfo(jnp.int32).max, jnp.int32)
    threshold, _ = lax.fori_loop(0, 32, halve, (least, most))
    above = keys > threshold[None]
    at = keys == threshold[None]
    room = topk - jnp.sum(above, axis=0, dtype=jnp.int32)
    has_ties = jnp.any(jnp.sum(at, axis=0, dtype=jnp.int32) > room)
    first = lax.cond(
        has_ties,
        lambda: at & (jnp.cumsum(at, axis=0, dtype=jnp.int32) <= room[None]),
        lambda: at,
    )
    return above | first


def _ordered_bits(x: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Int32 that compare like the floats; -0.0 equals 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
