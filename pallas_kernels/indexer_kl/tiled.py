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

from pallas_kernels import dispatch, selection, tiles, varying
from pallas_kernels.dense_attention import tiled as attention
from pallas_kernels.indexer_kl import gradient as gradient_lib
from pallas_kernels.indexer_topk import tiled as indexer
from pallas_kernels.sparse_mla import tiled as lists


def indexer_kl_loss(
    main: tuple,
    index: tuple,
    lo: Array,
    hi: Array,
    selected: Array | None,
    weight: Array,
    scale: float,
) -> Float[Array, ""]:
    """See `pallas_kernels.indexer_kl_loss`."""
    q, k, lse = main
    mask = selection.as_mask(selected, k.shape[1])
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
    return gradient_lib.times(factor, gradient), None, None


_loss.defvjp(_forward, _backward)


def _over_tiles(
    index: tuple, main: tuple, rows: tuple, scale: float, with_gradient: bool
) -> tuple:
    """Computes the loss [B, T, 1] and, on request, its gradient for q, k and w."""
    tile = functools.partial(_tile, scale=scale)

    def sequence(index: tuple, main: tuple, rows: tuple) -> tuple:
        (q, k, lse), (q_index, k_index, w) = main, index
        bounds, weight, mask = rows
        queries = (q, lse, q_index, w, bounds, weight)
        args = (index, main, rows)
        zeros = varying.zeros(k_index.shape, jnp.float32, args)
        dk = zeros if with_gradient else None
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
    """Processes a tile of queries and the keys that it sees; arrays are keys x queries.

    Unless dk is None, adds to dk and returns dq and dw with the loss.
    """
    q, lse, q_index, w, bounds, weight = queries
    k, k_index = keys
    keep = attention.kept(bounds, mask, k_index.shape[0])
    scores = attention.tile_scores(k, attention.scaled(q, scale), keep)
    target = jnp.mean(jnp.exp(scores - lse[:, None, :, 0]), axis=0)
    index_scores = indexer.tile_scores(q_index, k_index, w)
    index_scores = jnp.where(keep, index_scores, attention.HIDDEN)
    norm = special.logsumexp(index_scores, axis=0, keepdims=True)
    log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - (index_scores - norm)
    loss = weight * jnp.sum(jnp.where(keep, target * log_ratio, 0), axis=0)[:, None]
    if dk is None:
        return None, (loss,)
    probs = jnp.where(keep, jnp.exp(index_scores - norm), 0)
    total = jnp.sum(target, axis=0)  # 1, or 0 without keys
    d_scores = (probs * total[None] - target) * weight.T
    k_index = k_index.astype(jnp.float32)

    def head(dk: Array, head: tuple) -> tuple[Array, tuple]:
        q, w = head
        dots = indexer.head_scores(q, k_index)
        d_dots = jnp.where(dots > 0, d_scores * w[None], 0)
        dk = dk + jnp.einsum("st,tj->sj", d_dots, q.astype(jnp.float32))
        dq = jnp.einsum("st,sj->tj", d_dots, k_index)
        return dk, (dq, jnp.sum(dots * d_scores, axis=0))

    zeros = varying.zeros(k_index.shape, jnp.float32, (d_scores, k_index, q_index))
    dk_tile, (dq, dw) = lax.scan(head, zeros, (q_index, w.T))
    return dk.at[: dk_tile.shape[0]].add(dk_tile), (loss, dq, dw.T)


def sparse_indexer_kl_loss(
    main: tuple,
    index: tuple,
    indices: Array,
    weight: Array,
    scale: float,
) -> Float[Array, ""]:
    """See `pallas_kernels.sparse_indexer_kl_loss`."""
    return _sparse_loss(index, main, (indices, weight), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sparse_loss(index: tuple, main: tuple, rows: tuple, scale: float) -> Array:
    return _over_lists(index, main, rows, scale)[0]


def _sparse_forward(index, main, rows, scale):  # noqa: ANN001, ANN202
    return dispatch.saved(_over_lists(index, main, rows, scale))


_sparse_loss.defvjp(_sparse_forward, _backward)


def _over_lists(
    index: tuple, main: tuple, rows: tuple, scale: float
) -> tuple[Array, tuple]:
    """Computes the loss, and its gradient for q, k and w."""
    (q, kv, lse), (q_index, k_index, w), (indices, weight) = main, index, rows
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def tile(dk: Array, *queries: Array) -> tuple[Array, tuple]:
        q, lse, q_index, w, indices, weight = queries
        keep = indices >= 0
        scores = dot("btnc,btkc->btnk", q, lists.gather(kv, indices)) * scale
        probs = jnp.mean(jnp.exp(scores - lse[..., None]), axis=2)
        target = jnp.where(keep, probs, 0)
        k_rows = lists.gather(k_index, indices).astype(jnp.float32)
        dots = jax.nn.relu(dot("btij,btkj->btik", q_index.astype(jnp.float32), k_rows))
        index_scores = jnp.sum(dots * w[..., None], axis=2)
        index_scores = jnp.where(keep, index_scores, attention.HIDDEN)
        norm = special.logsumexp(index_scores, axis=-1, keepdims=True)
        log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - (index_scores - norm)
        loss = weight * jnp.sum(jnp.where(keep, target * log_ratio, 0), axis=-1)
        total = jnp.sum(target, axis=-1, keepdims=True)  # 1, or 0 without keys
        probs = jnp.where(keep, jnp.exp(index_scores - norm), 0)
        d_scores = (probs * total - target) * weight[..., None]
        d_dots = jnp.where(dots > 0, d_scores[:, :, None] * w[..., None], 0)
        dq = dot("btik,btkj->btij", d_dots, k_rows)
        d_rows = dot("btik,btij->btkj", d_dots, q_index.astype(jnp.float32))
        dw = jnp.sum(dots * d_scores[:, :, None], axis=-1)
        return lists.scatter_add(dk, d_rows, indices), (loss, dq, dw)

    zeros = varying.zeros(k_index.shape, jnp.float32, (index, main, rows))
    queries = (q, lse.swapaxes(1, 2), q_index, w, indices, weight)
    dk, (loss, dq, dw) = tiles.over_queries(tile, zeros, *queries)
    gradient = [g.astype(x.dtype) for g, x in zip((dq, dk, dw), index, strict=True)]
    return jnp.sum(loss), tuple(gradient)
