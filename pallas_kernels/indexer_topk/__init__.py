"""The lightning indexer: scores of every key, and the exact top-k of them.

I[t, s] = sum_i w[t, i] * ReLU(q[t, i] . k[s]), in float32 (GLM-5, arXiv 2602.15763;
DeepSeek-V3.2, arXiv 2512.02556). Scales are folded into w: ReLU is homogeneous.
Selection: the larger score first, then the lower index. Not differentiable: gradients
reach the indexer through `pallas_kernels.indexer_kl_loss` alone.
"""

from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.indexer_topk import reference, tiled

IMPLEMENTATIONS = ("tiled", "reference")
indexer_scores = reference.indexer_scores
indexer_topk = reference.indexer_topk


def indexer_mask(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    *,
    topk: int,
    implementation: str | None = None,
) -> Bool[Array, "B S T"]:
    """Marks the top-k keys of every query among those that it may see; keys first.

    Args:
      q: indexer queries, rotated.
      k: indexer keys, normalised and rotated.
      w: head weights, scales included.
      lo: first visible key.
      hi: end of the visible keys; at most t + 1 + S - T.
      topk: keys to select; with fewer visible ones all are.
      implementation: "tiled", "reference" or None for the best one.
    """
    q, k, w = lax.stop_gradient((q, k, w))
    name = dispatch.choose(implementation, "tiled", IMPLEMENTATIONS)
    module = tiled if name == "tiled" else reference
    return dispatch.saved(module.indexer_mask(q, k, w, lo, hi, topk))
