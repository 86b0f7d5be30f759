"""What trains the indexer: its KL divergence from the main attention.

L = sum_t weight[t] KL(p_t || softmax_s I_t) over the keys that mask selects, where
p_t is the mean of the attention's heads, restored from its log-sum-exp
(DeepSeek-V3.2, arXiv 2512.02556; averaged targets: IndexCache, arXiv 2603.12201).
Gradients reach the indexer alone: q_index, k_index and w.
"""

from typing import Any

from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.indexer_kl import reference, tiled

IMPLEMENTATIONS = ("tiled", "reference")


def indexer_kl_loss(
    main: tuple[Array, Array, Array],
    index: tuple[Any, Any, Any],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    mask: Bool[Array, "B S T"] | None,
    weight: Float[Array, "B T"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Sum over queries of weight times the KL divergence, in float32.

    Args:
      main: q [B, T, N, H], k [B, S, N, H] and log-sum-exp [B, N, T] of the main
        attention over the same keys.
      index: q [B, T, I, J], k [B, S, J] and head weights [B, T, I] of the indexer.
      lo: first visible key.
      hi: end of the visible keys.
      mask: the selected set, keys first, or None for all (the dense warm-up).
      weight: of each query; 0 leaves it out.
      scale: the main attention's factor on q . k.
      implementation: "tiled", "reference" or None for the best one.
    """
    name = dispatch.choose(implementation, "tiled", IMPLEMENTATIONS)
    module = tiled if name == "tiled" else reference
    main = lax.stop_gradient(main)
    return module.indexer_kl_loss(main, index, lo, hi, mask, weight, scale)
