"""The definition of the indexer's scores and of its selection."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def indexer_scores(
    q: Float[Array, "B T I J"], k: Float[Array, "B S J"], w: Float[Array, "B T I"]
) -> Float[Array, "B T S"]:
    """I = sum_i w_i ReLU(q_i . k), float32."""
    dots_BTIS = jnp.einsum(
        "btij,bsj->btis", *_exact(q, k), preferred_element_type=jnp.float32
    )
    return jnp.einsum("bti,btis->bts", w.astype(jnp.float32), jax.nn.relu(dots_BTIS))


def visible(lo: Int[Array, "*n"], hi: Int[Array, "*n"], keys: int) -> Array:
    """Which of the S = `keys` keys lie in lo .. hi - 1: [*n, S]."""
    s = jnp.arange(keys).reshape((1,) * lo.ndim + (-1,))
    return (s >= lo[..., None]) & (s < hi[..., None])


def selected(lo: Array, hi: Array, mask: Array | None, keys: int) -> Array:
    """Which keys count for each query: the mask's, or all visible ones: [B, T, S]."""
    return visible(lo, hi, keys) if mask is None else mask.swapaxes(1, 2)


def indexer_mask(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> Bool[Array, "B S T"]:
    """The first `topk` of the visible keys in a stable sort by falling score."""
    seen = visible(lo, hi, k.shape[1])
    scores = jnp.where(seen, indexer_scores(q, k, w), -jnp.inf)
    order = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1, stable=True)
    return ((rank < topk) & seen).swapaxes(1, 2)


def indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    topk: int,
) -> Int[Array, "B T K"]:
    """Indices of the same keys, ascending, padded with -1 at the end.

    The form for decoding, where T is small; K = min(topk, S).
    """
    num_keys = k.shape[1]
    scores = jnp.where(visible(lo, hi, num_keys), indexer_scores(q, k, w), -jnp.inf)
    values, indices = lax.top_k(scores, min(topk, num_keys))
    ascending = jnp.sort(jnp.where(values > -jnp.inf, indices, num_keys), axis=-1)
    return jnp.where(ascending < num_keys, ascending, -1)


def _exact(*arrays: Array) -> tuple[Array, ...]:
    """Float32 copies: two roundings of a score would select two sets."""
    return tuple(x.astype(jnp.float32) for x in arrays)
