"""The definition of the indexer's scores and of its selection."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import selection

EXACT = lax.Precision.HIGHEST  # else accelerators round float32 operands first
# Replaces a score of -inf, so that visible keys rank before invisible ones.
LEAST = float(jnp.finfo(jnp.float32).min)


def indexer_scores(
    q: Float[Array, "B T I J"], k: Float[Array, "B S J"], w: Float[Array, "B T I"]
) -> Float[Array, "B T S"]:
    """Computes I = sum_i w_i ReLU(q_i . k) in float32."""
    dots_BTIS = jnp.einsum("btij,bsj->btis", *_exact(q, k), precision=EXACT)
    weights = w.astype(jnp.float32)
    return jnp.einsum("bti,btis->bts", weights, jax.nn.relu(dots_BTIS), precision=EXACT)


def ranked(scores: Float[Array, "*n"], seen: Bool[Array, "*n"]) -> Float[Array, "*n"]:
    """Returns scores in which only invisible keys have -inf."""
    return jnp.where(seen, jnp.maximum(scores, LEAST), -jnp.inf)


def indexer_mask(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> Bool[Array, "B S T"]:
    """Marks the first `topk` visible keys in a stable sort by descending score."""
    seen = selection.visible(lo, hi, k.shape[1])
    scores = ranked(indexer_scores(q, k, w), seen)
    order = jnp.argsort(-scores)  # stable: of equal scores the lower index goes first
    rank = jnp.argsort(order)
    return ((rank < topk) & seen).swapaxes(1, 2)


def indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> Int[Array, "B T K"]:
    """Lists the same keys, ascending, padded with -1 at the end.

    This form is for decoding, where T is small.
    """
    num_keys = k.shape[1]
    seen = selection.visible(lo, hi, num_keys)
    scores = ranked(indexer_scores(q, k, w), seen)
    values, indices = lax.top_k(scores, min(topk, num_keys))
    ascending = jnp.sort(jnp.where(values > -jnp.inf, indices, num_keys), axis=-1)
    room = [(0, 0), (0, 0), (0, topk - ascending.shape[-1])]
    return jnp.pad(
        jnp.where(ascending < num_keys, ascending, -1), room, constant_values=-1
    )


def indexer_bits(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> UInt32[Array, "B T W"]:
    """Returns the same selection as bits."""
    return selection.pack(indexer_mask(q, k, w, lo, hi, topk))


def indexer_scores_at(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    indices: Int[Array, "B T K"],
) -> Float[Array, "B T K"]:
    """See `pallas_kernels.indexer_scores_at`."""
    rows = jax.vmap(lambda k, i: k[i])(k, jnp.maximum(indices, 0))
    dots = jnp.einsum("btij,btkj->btik", *_exact(q, rows), precision=EXACT)
    weights = w.astype(jnp.float32)
    scores = jnp.einsum("bti,btik->btk", weights, jax.nn.relu(dots), precision=EXACT)
    return jnp.where(indices < 0, 0, scores)


def _exact(*arrays: Array) -> tuple[Array, ...]:
    """Casts to float32, because other roundings of a score would select other keys."""
    return tuple(x.astype(jnp.float32) for x in arrays)
