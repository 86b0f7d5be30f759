"""The loss and its gradient in one pass over tiles.

The loss is a scalar, so its gradient is known up to a factor while it is computed:
dI = softmax(I) - p. The backward pass only multiplies; no tile is visited twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special
from jaxtyping import Array, Float

from pallas_kernels import dispatch, tiles
from pallas_kernels.indexer_topk import tiled as indexer
from pallas_kernels.masked_mla import tiled as attention


def indexer_kl_loss(
    main: tuple,
    index: tuple,
    lo: Array,
    hi: Array,
    mask: Array | None,
    weight: Array,
    scale: float,
) -> Float[Array, ""]:
    """See `pallas_kernels.indexer_kl_loss`."""
    q, k, lse = main
    q_index, k_index, w = index
    main = (q.swapaxes(1, 2), k.swapaxes(1, 2), lse[..., None])
    index = (q_index.swapaxes(1, 2), k_index, w)
    bounds = (lo[..., None], hi[..., None])
    return _loss(index, main, (bounds, weight[..., None], mask), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(index: tuple, main: tuple, rows: tuple, scale: float) -> Array:
    return jnp.sum(_over_tiles(index, main, rows, scale, with_gradient=False)[0])


def _forward(index, main, rows, scale):  # noqa: ANN001, ANN202
    loss, *gradient = _over_tiles(index, main, rows, scale, with_gradient=True)
    dtypes = [x.dtype for x in index]
    gradient = [g.astype(d) for g, d in zip(gradient, dtypes, strict=True)]
    return dispatch.saved((jnp.sum(loss), gradient))


def _backward(scale, gradient, factor):  # noqa: ANN001, ANN202
    return tuple(g * factor.astype(g.dtype) for g in gradient), None, None


_loss.defvjp(_forward, _backward)


def _over_tiles(
    index: tuple, main: tuple, rows: tuple, scale: float, with_gradient: bool
) -> tuple:
    """Loss per query [B, T, 1] and, if wanted, its gradient for q, k and w."""
    tile = functools.partial(_tile, scale=scale)

    def sequence(index: tuple, main: tuple, rows: tuple) -> tuple:
        (q, k, lse), (q_index, k_index, w) = main, index
        bounds, weight, mask = rows
        queries = (q, lse, q_index, w, bounds, weight)
        dk = jnp.zeros(k_index.shape, jnp.float32) if with_gradient else None
        dk, out = tiles.over_tiles(tile, dk, queries, (k, k_index), mask)
        return (out[0], out[1], dk, out[2]) if with_gradient else out

    return tiles.over_sequences(sequence, index, main, rows)


def _tile(
    dk: Array | None,
    queries: tuple,
    keys: tuple,
    mask: Array | None,
    scale: float,
) -> tuple[Array | None, tuple]:
    """One tile of queries against the keys that it sees; arrays keys x queries.

    Adds to dk, and returns dq and dw beside the loss, unless dk is None.
    """
    q, lse, q_index, w, bounds, weight = queries
    k, k_index = keys
    keep = attention.selected(bounds, mask, k_index.shape[0])
    scores = attention.tile_scores(k, q * scale, keep)
    target = jnp.mean(jnp.exp(scores - lse[:, None, :, 0]), axis=0)
    index_scores = indexer.tile_scores(q_index, k_index, w)
    index_scores = jnp.where(keep, index_scores, attention.HIDDEN)
    norm = special.logsumexp(index_scores, axis=0, keepdims=True)
    log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - (index_scores - norm)
    loss = weight * jnp.sum(jnp.where(keep, target * log_ratio, 0), axis=0)[:, None]
    if dk is None:
        return None, (loss,)
    probs = jnp.where(keep, jnp.exp(index_scores - norm), 0)
    total = jnp.sum(target, axis=0)  # 1, or 0 in a row without keys
    d_scores = (probs * total[None] - target) * weight.T
    k_index = k_index.astype(jnp.float32)

    def head(dk: Array, head: tuple) -> tuple[Array, tuple]:
        q, w = head
        dots = indexer.head_scores(q, k_index)
        d_dots = jnp.where(dots > 0, d_scores * w[None], 0)
        dk = dk + jnp.einsum("st,tj->sj", d_dots, q.astype(jnp.float32))
        dq = jnp.einsum("st,sj->tj", d_dots, k_index)
        return dk, (dq, jnp.sum(dots * d_scores, axis=0))

    dk_tile, (dq, dw) = lax.scan(head, jnp.zeros_like(k_index), (q_index, w.T))
    return dk.at[: dk_tile.shape[0]].add(dk_tile), (loss, dq, dw.T)
