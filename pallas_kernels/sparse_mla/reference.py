"""The definition: gather, softmax in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "B S row"],
    indices: Int[Array, "B T K"],
    scale: float,
    value_dim: int,
    deterministic: bool,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.sparse_mla`; its order of summation is always the same."""
    del deterministic
    rows = jax.vmap(lambda kv, i: kv[i])(kv, jnp.maximum(indices, 0))
    rows = rows.astype(q.dtype)
    return attend(q, rows, indices >= 0, scale, value_dim)


def attend(
    q: Float[Array, "B T N row"],
    rows: Float[Array, "B T K row"],
    is_key: Bool[Array, "B T K"],
    scale: float,
    value_dim: int,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """Attends to rows that were fetched for each query."""
    is_key = is_key[:, :, None]
    scores = jnp.einsum("btnc,btkc->btnk", q, rows, preferred_element_type=jnp.float32)
    scores = jnp.where(is_key, scores * scale, -1e30)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(is_key, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    has_key = total > 0
    total = jnp.where(has_key, total, 1)
    probs = weights / total
    lse = jnp.where(has_key, top + jnp.log(total), 0)
    out = jnp.einsum(
        "btnk,btkc->btnc",
        probs.astype(rows.dtype),
        rows[..., :value_dim],
        preferred_element_type=jnp.float32,
    )
    return out.astype(q.dtype), lse[..., 0].swapaxes(1, 2)
