"""Selection tile by tile: no [T, S] array of scores, no sort.

Bisection on the bits of scores finds a query's k-th largest: it counts 32 times over a
tile in the cache, which is several times cheaper on CPU than `lax.top_k`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import selection, tiles, varying
from pallas_kernels.indexer_topk import reference

LOWEST, HIGHEST = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max


def tile_scores(
    q: Float[Array, "I T J"], k: Float[Array, "S J"], w: Float[Array, "T I"]
) -> Float[Array, "S T"]:
    """Scores one tile, keys first, in a loop over heads whose products stay in cache.

    A single product of all heads and a sum over them takes three times as long.
    """
    k, weights = k.astype(jnp.float32), w.astype(jnp.float32).T

    def add_head(i: Array, scores: Array) -> Array:
        return scores + head_scores(q[i], k) * weights[i][None]

    zeros = varying.zeros((k.shape[0], q.shape[1]), jnp.float32, (q, k, w))
    return lax.fori_loop(0, q.shape[0], add_head, zeros)


def head_scores(q: Float[Array, "T J"], k: Float[Array, "S J"]) -> Float[Array, "S T"]:
    """Returns ReLU(q . k) of one head."""
    return jax.nn.relu(
        jnp.einsum("sj,tj->st", k, q.astype(jnp.float32), precision=reference.EXACT)
    )


def visible(lo: Int[Array, "T 1"], hi: Int[Array, "T 1"], keys: int) -> Array:
    """Returns which keys each query of a tile may see: [S, T]."""
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
        mask_ST = topk_mask(tile_scores(q, k, w), visible(lo, hi, k.shape[0]), topk)
        return None, jnp.pad(mask_ST, ((0, num_keys - k.shape[0]), (0, 0)))

    return tiles.over_sequences(
        sequence, q.swapaxes(1, 2), w, lo[..., None], hi[..., None], k
    )


def indexer_bits(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> UInt32[Array, "B T W"]:
    """See `pallas_kernels.indexer_bits`."""
    return selection.pack(indexer_mask(q, k, w, lo, hi, topk))


def indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> Int[Array, "B T K"]:
    """See `pallas_kernels.indexer_topk`; sorts one tile of scores at a time."""

    def tile(_: None, q: Array, w: Array, lo: Array, hi: Array) -> tuple[None, Array]:
        return None, reference.indexer_topk(q, k, w, lo, hi, topk)

    return tiles.over_queries(tile, None, q, w, lo, hi)[1]


def indexer_scores_at(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    indices: Int[Array, "B T K"],
) -> Float[Array, "B T K"]:
    """See `pallas_kernels.indexer_scores_at`; gathers keys by tiles of queries."""
    k = k.astype(jnp.float32)  # gradients are summed over tiles in float32

    @jax.checkpoint
    def tile(_: None, q: Array, w: Array, indices: Array) -> tuple[None, Array]:
        return None, reference.indexer_scores_at(q, k, w, indices)

    return tiles.over_queries(tile, None, q, w, indices)[1]


def topk_mask(
    scores: Float[Array, "S T"], is_visible: Bool[Array, "S T"], topk: int
) -> Bool[Array, "S T"]:
    """Marks the `topk` largest visible scores per column; ties go to the lower row."""
    keys = jnp.where(is_visible, _ordered_bits(scores), LOWEST)
    threshold = _kth_largest(keys, jnp.full(keys.shape[1:], topk), LOWEST + 1, HIGHEST)
    above = keys > threshold[None]
    at = keys == threshold[None]
    room = topk - jnp.sum(above, axis=0, dtype=jnp.int32)
    has_ties = jnp.any(jnp.sum(at, axis=0, dtype=jnp.int32) > room)

    def first() -> Array:
        num_rows = len(keys)
        row = jnp.where(at, jnp.arange(num_rows, 0, -1)[:, None], 0)
        return at & (row >= _kth_largest(row, room, 0, num_rows + 1)[None])

    return above | lax.cond(has_ties, first, lambda: at)


def _kth_largest(
    x: Int[Array, "S T"], k: Int[Array, " T"], low: int, high: int
) -> Int[Array, " T"]:
    """Returns each column's k-th largest if it is in low .. high - 1, else low."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # count(low) >= k > count(high), or low is the least
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # no overflow
        is_enough = jnp.sum(x >= middle[None], axis=0, dtype=jnp.int32) >= k
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    zeros = varying.zeros(k.shape, jnp.int32, (x, k))
    bounds = (zeros + low, zeros + high)
    return lax.fori_loop(0, (high - low).bit_length(), halve, bounds)[0]


def _ordered_bits(x: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """Returns int32 that compare like the floats; -0.0 equals 0.0."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ HIGHEST, bits)
