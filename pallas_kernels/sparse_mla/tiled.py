"""Plain XLA, a few queries at a time: the CPU form and the benchmark's comparison.

A tile gathers its rows into [GATHERING_ROWS, K, row] and scatters their gradient back
in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch, tiles, varying
from pallas_kernels.sparse_mla import reference


def sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "B S row"],
    indices: Int[Array, "B T K"],
    scale: float,
    value_dim: int,
    deterministic: bool,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.sparse_mla`; as deterministic as XLA's scatter."""
    del deterministic
    return _attend(q, kv, indices, scale, value_dim)


def gather(kv: Float[Array, "B S row"], indices: Int[Array, "B T K"]) -> Array:
    """Gathers the listed rows, the first row for -1: [B, T, K, row]."""
    return jax.vmap(lambda kv, i: kv[i])(kv, jnp.maximum(indices, 0))


def scatter_add(total: Array, rows: Array, indices: Array) -> Array:
    """Adds rows [B, T, K, row] to total [B, S, row] at the rows that `gather` read."""
    place = jnp.where(indices < 0, total.shape[1], indices)
    add = jax.vmap(lambda total, rows, i: total.at[i].add(rows, mode="drop"))
    return add(total, rows.astype(total.dtype), place)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q: Array, kv: Array, indices: Array, scale: float, value_dim: int) -> tuple:
    def tile(_: None, q: Array, indices: Array) -> tuple[None, tuple]:
        rows, is_key = gather(kv, indices).astype(q.dtype), indices >= 0
        out, lse = reference.attend(q, rows, is_key, scale, value_dim)
        return None, (out, lse.swapaxes(1, 2))

    _, (out, lse) = tiles.over_queries(tile, None, q, indices)
    return out, lse.swapaxes(1, 2)


def _forward(q, kv, indices, scale, value_dim):  # noqa: ANN001, ANN202
    out, lse = dispatch.saved(_attend(q, kv, indices, scale, value_dim))
    return (out, lse), (q, kv, indices, out, lse)


def _backward(scale, value_dim, residuals, cotangents):  # noqa: ANN001, ANN202
    q, kv, indices, out, lse = residuals
    d_out, d_lse = cotangents
    shift = jnp.sum(out * d_out, axis=-1, dtype=jnp.float32) - d_lse.swapaxes(1, 2)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def tile(dkv: Array, *queries: Array) -> tuple[Array, Array]:
        q, indices, lse, shift, d_out = queries
        rows = gather(kv, indices).astype(q.dtype)
        scores = dot("btnc,btkc->btnk", q, rows) * scale
        probs = jnp.where(indices[:, :, None] < 0, 0, jnp.exp(scores - lse[..., None]))
        d_probs = dot("btnc,btkc->btnk", d_out, rows[..., :value_dim])
        d_scores = (scale * probs * (d_probs - shift[..., None])).astype(q.dtype)
        dq = dot("btnk,btkc->btnc", d_scores, rows).astype(q.dtype)
        d_rows = dot("btnk,btnc->btkc", d_scores, q)
        d_rows = d_rows.at[..., :value_dim].add(
            dot("btnk,btnc->btkc", probs.astype(q.dtype), d_out)
        )
        return scatter_add(dkv, d_rows, indices), dq

    zeros = varying.zeros(kv.shape, jnp.float32, residuals)
    dkv, dq = tiles.over_queries(
        tile, zeros, q, indices, lse.swapaxes(1, 2), shift, d_out.astype(q.dtype)
    )
    return dq, dkv.astype(kv.dtype), None


_attend.defvjp(_forward, _backward)
