"""The definition: all scores at once, softmax in float32."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import selection


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
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    seen = selection.as_rows(lo, hi, selected, k.shape[1])[:, None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores * scale, -1e30)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    has_key = total > 0
    total = jnp.where(has_key, total, 1)
    probs = weights / total
    lse = jnp.where(has_key, top + jnp.log(total), 0)
    out = jnp.einsum(
        "bnts,bsno->btno", probs.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.astype(v.dtype), lse[..., 0]
