"""The definition: holds all scores and all head-averaged probabilities at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import selection
from pallas_kernels.indexer_topk import reference as indexer


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
    keep = selection.as_rows(lo, hi, selected, k.shape[1])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    probs = jnp.mean(jnp.exp(scores * scale - lse[..., None]), axis=1)
    target = jnp.where(keep, probs, 0)
    scores = jnp.where(keep, indexer.indexer_scores(*index), -1e30)
    log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - jax.nn.log_softmax(scores)
    kl = jnp.sum(jnp.where(keep, target * log_ratio, 0), axis=-1)
    return jnp.sum(kl * weight)


def sparse_indexer_kl_loss(
    main: tuple, index: tuple, indices: Array, weight: Array, scale: float
) -> Float[Array, ""]:
    """See `pallas_kernels.sparse_indexer_kl_loss`."""
    q, kv, lse = main
    k_main = jnp.broadcast_to(kv[:, :, None], (*kv.shape[:2], *q.shape[2:]))
    mask = selection.to_mask(indices, kv.shape[1])
    bounds = jnp.zeros(indices.shape[:2], jnp.int32)  # unused: the mask is complete
    main = (q, k_main, lse)
    return indexer_kl_loss(main, index, bounds, bounds, mask, weight, scale)
