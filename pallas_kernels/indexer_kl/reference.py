"""The definition, with all of I and of the head-averaged probabilities at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.indexer_topk import reference as indexer


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
    keep = indexer.selected(lo, hi, mask, k.shape[1])
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    probs = jnp.mean(jnp.exp(scores * scale - lse[..., None]), axis=1)
    target = jnp.where(keep, probs, 0)
    scores = jnp.where(keep, indexer.indexer_scores(*index), -1e30)
    log_ratio = jnp.log(jnp.maximum(target, 1e-30)) - jax.nn.log_softmax(scores)
    kl = jnp.sum(jnp.where(keep, target * log_ratio, 0), axis=-1)
    return jnp.sum(kl * weight)
