"""What trains the indexer: its KL divergence from the main attention.

L = sum_t weight[t] KL(p_t || softmax_s I_t) over the selected keys, where
p_t is the mean of the attention's heads, restored from its log-sum-exp
(DeepSeek-V3.2, arXiv 2512.02556; averaged targets: IndexCache, arXiv 2603.12201).
Gradients reach the indexer alone: q_index, k_index and w.
"""

from typing import Any

from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import dispatch

IMPLEMENTATIONS = ("tiled", "tpu", "gpu", "reference")


def indexer_kl_loss(
    main: tuple[Array, Array, Array],
    index: tuple[Any, Any, Any],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    selection: Bool[Array, "B S T"] | UInt32[Array, "B T W"] | None,
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
      selection: a mask or bits, or None for all (the dense warm-up).
      weight: of each query; 0 leaves it out.
      scale: the main attention's factor on q . k.
      implementation: see IMPLEMENTATIONS; None for the best one.
    """
    args = (lax.stop_gradient(main), index, lo, hi, selection, weight, scale)
    run = dispatch.choose(
        "indexer_kl",
        implementation,
        IMPLEMENTATIONS,
        *args,
        function="indexer_kl_loss",
    )
    return run(*args)


def sparse_indexer_kl_loss(
    main: tuple[Array, Array, Array],
    index: tuple[Any, Any, Any],
    indices: Int[Array, "B T K"],
    weight: Float[Array, "B T"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """The same over listed keys, with the main attention in latent form.

    Args:
      main: q [B, T, N, c], kv [B, S, c] and log-sum-exp [B, N, T] of `sparse_mla` over
        the same list.
      index: q [B, T, I, J], k [B, S, J] and head weights [B, T, I] of the indexer.
      indices: keys of each query, padded with -1.
      weight: of each query; 0 leaves it out.
      scale: the main attention's factor on q . kv.
      implementation: see IMPLEMENTATIONS; None for the best one.
    """
    args = (lax.stop_gradient(main), index, indices, weight, scale)
    run = dispatch.choose(
        "indexer_kl",
        implementation,
        IMPLEMENTATIONS,
        *args,
        function="sparse_indexer_kl_loss",
    )
    return run(*args)
