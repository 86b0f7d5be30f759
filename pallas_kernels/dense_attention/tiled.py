"""Flash-like attention in plain XLA: tiles of queries, probabilities recomputed.

Scores are keys x queries, [N, S, T], and operands summed over keys are transposed once.
Every product except dk and dv then runs along rows, which is fast on CPU.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, selection, tiles, varying
from pallas_kernels.indexer_topk import tiled as indexer

HIDDEN = -1e30  # score of a key that is not selected; exp(HIDDEN - finite) is 0


def dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N O"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    selected: Array | None,
    scale: float,
) -> tuple[Float[Array, "B T N O"], Float[Array, "B N T"]]:
    """See `pallas_kernels.dense_attention`."""
    mask = selection.as_mask(selected, k.shape[1])
    bounds = (lo[..., None], hi[..., None])
    heads_first = [x.swapaxes(1, 2) for x in (q, k, v)]
    out, lse = _attend(*heads_first, bounds, mask, scale)
    return out.swapaxes(1, 2), lse[..., 0]


def kept(bounds: tuple[Array, Array], mask: Array | None, num_keys: int) -> Array:
    """Marks the keys that count for each query of a tile: [S, T]."""
    return indexer.visible(*bounds, num_keys) if mask is None else mask


def scaled(q: Array, scale: float) -> tuple[Array, float]:
    """Returns queries times a power of two, and the rest of scale for the scores.

    A scale that is not a power of two would be rounded in bfloat16, with the same error
    in every score of a query. The rest is therefore multiplied in float32.
    """
    is_exact = q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5
    return (q * scale, 1.0) if is_exact else (q, scale)


def tile_scores(k: Array, queries: tuple[Array, float], keep: Array) -> Array:
    """Scores of a tile in float32, HIDDEN where not kept: [N, S, T].

    `queries` come from `scaled`.
    """
    q, rest = queries
    scores = jnp.einsum("nsh,nth->nst", k, q, preferred_element_type=jnp.float32)
    return jnp.where(keep[None], scores * rest, HIDDEN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: Array, k: Array, v: Array, bounds: tuple, mask: Array | None, scale: float
) -> tuple[Array, Array]:
    """Attends, heads first: output [B, N, T, O] and log-sum-exp [B, N, T, 1]."""

    def tile(
        _: None, queries: tuple, keys: tuple, mask: Array | None
    ) -> tuple[None, tuple]:
        (q, bounds), (k, v_NOS) = queries, keys
        scores = tile_scores(k, scaled(q, scale), kept(bounds, mask, k.shape[1]))
        top = jnp.max(scores, axis=1)
        weights = jnp.exp(scores - top[:, None])
        total = jnp.sum(weights, axis=1)
        is_empty = top == HIDDEN
        inverse = jnp.where(is_empty, 0, 1 / total)
        out = jnp.einsum("nos,nst->not", v_NOS, weights)
        out = (out * inverse[:, None]).swapaxes(1, 2).astype(q.dtype)
        lse = jnp.where(is_empty, 0, top + jnp.log(total))
        return None, (out, lse[..., None])

    def sequence(
        q: Array, k: Array, v: Array, bounds: tuple, mask: Array | None
    ) -> tuple:
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        # XLA on CPU has no such product of bfloat16 into float32.
        keys = (k, v.mT.astype(jnp.float32))
        _, out = tiles.over_tiles(
            tile, None, (q, bounds), keys, mask, key_axes=(-2, -1)
        )
        return out

    return tiles.over_sequences(sequence, q, k, v, bounds, mask)


def _forward(q, k, v, bounds, mask, scale):  # noqa: ANN001, ANN202
    out, lse = dispatch.saved(_attend(q, k, v, bounds, mask, scale))
    return (out, lse), (q, k, v, bounds, mask, out, lse)


def _backward(scale, residuals, cotangents):  # noqa: ANN001, ANN202
    """Runs flash attention's five products; the log-sum-exp's cotangent adds to dS."""

    def tile(
        carry: tuple, queries: tuple, keys: tuple, mask: Array | None
    ) -> tuple[tuple, Array]:
        (q, bounds, lse, d_out, shift), (k, v, k_NHS) = queries, keys
        q, rest = scaled(q, scale)
        scores = tile_scores(k, (q, rest), kept(bounds, mask, k.shape[1]))
        probs = jnp.exp(scores - lse[:, None, :, 0])
        d_probs = jnp.einsum(
            "nso,nto->nst", v, d_out, preferred_element_type=jnp.float32
        )
        d_scores = (probs * (d_probs - shift[:, None, :, 0])).astype(q.dtype)
        dq_NHT = scale * jnp.einsum("nhs,nst->nht", k_NHS, d_scores)
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        dk = rest * dot("nst,nth->nsh", d_scores, q)
        dv = dot("nst,nto->nso", probs.astype(v.dtype), d_out)
        seen = k.shape[1]
        return tuple(
            c.at[:, :seen].add(d) for c, d in zip(carry, (dk, dv), strict=True)
        ), dq_NHT

    def sequence(k: Array, v: Array, mask: Array | None, *queries: Any) -> tuple:
        of_keys = lambda x: varying.zeros(x.shape, jnp.float32, (k, v, queries))
        zeros, dtypes = (of_keys(k), of_keys(v)), (k.dtype, v.dtype)
        k, v = (x.astype(queries[0].dtype) for x in (k, v))
        keys = (k, v, k.mT)
        (dk, dv), dq_NHT = tiles.over_tiles(
            tile, zeros, queries, keys, mask, out_axis=-1, key_axes=(-2, -2, -1)
        )
        return dq_NHT.mT, dk.astype(dtypes[0]), dv.astype(dtypes[1])

    q, k, v, bounds, mask, out, lse = residuals
    d_out, d_lse = cotangents
    shift = jnp.sum(out * d_out, axis=-1, keepdims=True, dtype=jnp.float32) - d_lse
    args = (k, v, mask, q, bounds, lse, d_out, shift)
    dq, dk, dv = tiles.over_sequences(sequence, *args)
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)
