"""The loss that trains the indexer: its KL divergence from the main attention.

L = sum_t weight[t] KL(p_t || softmax_s I_t) over the selected keys. p_t is the mean of
the attention's probabilities over heads, restored from the log-sum-exp
(DeepSeek-V3.2, arXiv 2512.02556; averaged targets: IndexCache, arXiv 2603.12201).
Gradients reach only the indexer: q_index, k_index and w.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import contract, dispatch

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
      hi: end of the visible keys; cut to t + 1 + S - T if larger.
      selection: a mask or bits; None selects all visible keys (the dense warm-up).
      weight: weight of each query; 0 excludes it.
      scale: the main attention's factor on q . k.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    name, (q, k, lse) = "indexer_kl_loss", main
    floats = {"main's q": (q, "B T N H"), "main's k": (k, "B S N H")}
    floats |= _others(lse, index, weight)
    known, lo, hi = contract.bounded(name, floats, lo, hi)
    contract.form(name, selection, known)
    index, weight = _exact(index, weight)
    args = (lax.stop_gradient(main), index, lo, hi, selection, weight, scale)
    op = dispatch.Op("indexer_kl", name, IMPLEMENTATIONS, "dense")
    return dispatch.run(op, implementation, args)


def sparse_indexer_kl_loss(
    main: tuple[Array, Array, Array],
    index: tuple[Any, Any, Any],
    indices: Int[Array, "B T K"],
    weight: Float[Array, "B T"],
    *,
    scale: float,
    indices_are_sorted: bool = False,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Computes the loss over listed keys, with the main attention in latent form.

    Args:
      main: q [B, T, N, row], kv [B, S, row] and log-sum-exp [B, N, T] of `sparse_mla`
        over the same list.
      index: q [B, T, I, J], k [B, S, J] and head weights [B, T, I] of the indexer.
      indices: keys of each query, a set as in `sparse_mla`.
      weight: weight of each query; 0 excludes it.
      scale: the main attention's factor on q . kv.
      indices_are_sorted: promises lists in the order of `indexer_topk`'s, which saves
        sorting them; see `pallas_kernels.selection`.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    name, (q, kv, lse) = "sparse_indexer_kl_loss", main
    floats = {"main's q": (q, "B T N row"), "main's kv": (kv, "B S row")}
    floats |= _others(lse, index, weight)
    _, indices = contract.listed(name, floats, indices, indices_are_sorted)
    index, weight = _exact(index, weight)
    args = (lax.stop_gradient(main), index, indices, weight, scale)
    op = dispatch.Op("indexer_kl", name, IMPLEMENTATIONS, "listed")
    return dispatch.run(op, implementation, args)


def _others(lse: Array, index: tuple, weight: Array) -> dict[str, tuple[Array, str]]:
    """Checks the arguments that both losses share."""
    q, k, w = index
    return {
        "main's log-sum-exp": (lse, "B N T"),
        "index's q": (q, "B T I J"),
        "index's k": (k, "B S J"),
        "index's w": (w, "B T I"),
        "weight": (weight, "B T"),
    }


def _exact(index: tuple, weight: Array) -> tuple[tuple, Array]:
    """Casts weights of heads and queries to float32; w's gradient keeps w's type."""
    q, k, w = index
    return (q, k, w.astype(jnp.float32)), weight.astype(jnp.float32)
