"""The lightning indexer: scores of all keys, and their exact top-k.

I[t, s] = sum_i w[t, i] * ReLU(q[t, i] . k[s]), in float32 (GLM-5, arXiv 2602.15763;
DeepSeek-V3.2, arXiv 2512.02556). Scales are folded into w: ReLU is homogeneous.
Selection takes larger scores first, then lower indices. It is not differentiable:
gradients reach the indexer only through `indexer_scores_at` and the losses of
`indexer_kl`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8, UInt32

from pallas_kernels import contract, dispatch, eight_bits, selection
from pallas_kernels.indexer_topk import reference

IMPLEMENTATIONS = ("tiled", "tpu", "gpu", "reference")
indexer_scores = reference.indexer_scores


def indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    *,
    topk: int,
    k_exponents: Int8[Array, "B S"] | None = None,
    implementation: str | None = None,
) -> Int[Array, "B T K"]:
    """Lists the top-k visible keys of every query.

    Args:
      q: indexer queries, rotated. Codes of float8_e4m3fn have their factors in w.
      k: indexer keys, normalised and rotated; or codes of float8_e4m3fn.
      w: head weights, scales included.
      lo: first visible key.
      hi: end of the visible keys; cut to t + 1 + S - T if larger.
      topk: K, keys to select; all visible keys if there are fewer.
      k_exponents: powers of two that scale the rows of k, if they are codes; see
        `pallas_kernels.eight_bits`.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Returns:
      Indices, ascending, padded with -1 at the end.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    return _choose("indexer_topk", implementation, (q, k, w, lo, hi), topk, k_exponents)


def indexer_bits(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    *,
    topk: int,
    k_exponents: Int8[Array, "B S"] | None = None,
    implementation: str | None = None,
) -> UInt32[Array, "B T W"]:
    """Selects keys like `indexer_topk`, as bits (see `pallas_kernels.selection`)."""
    return _choose("indexer_bits", implementation, (q, k, w, lo, hi), topk, k_exponents)


def indexer_mask(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    *,
    topk: int,
    k_exponents: Int8[Array, "B S"] | None = None,
    implementation: str | None = None,
) -> Bool[Array, "B S T"]:
    """Selects keys like `indexer_topk`, as a mask, keys first."""
    return _choose("indexer_mask", implementation, (q, k, w, lo, hi), topk, k_exponents)


def indexer_select(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    *,
    topk: int,
    k_exponents: Int8[Array, "B S"] | None = None,
) -> Bool[Array, "B S T"] | UInt32[Array, "B T W"] | Int[Array, "B T K"]:
    """Selects keys like `indexer_topk`, in the form `selection.form` of this chip."""
    forms = {"mask": indexer_mask, "bits": indexer_bits, "list": indexer_topk}
    return forms[selection.form(k.shape[1])](
        q, k, w, lo, hi, topk=topk, k_exponents=k_exponents
    )


def indexer_scores_at(
    q: Float[Array, "B T I J"],
    k: Float[Array, "B S J"],
    w: Float[Array, "B T I"],
    indices: Int[Array, "B T K"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T K"]:
    """Scores of the listed keys, 0 for no key; differentiable in q, k, w.

    Args:
      q: indexer queries, rotated.
      k: indexer keys, normalised and rotated.
      w: head weights, scales included.
      indices: keys of each query, in any order; entries that name no key score 0.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    floats = {"q": (q, "B T I J"), "k": (k, "B S J"), "w": (w, "B T I")}
    _, indices = contract.listed("indexer_scores_at", floats, indices, is_sorted=True)
    args = (q, k, w.astype(jnp.float32), indices)
    op = dispatch.Op("indexer_topk", "indexer_scores_at", IMPLEMENTATIONS, "listed")
    return dispatch.run(op, implementation, args)


def _choose(
    function: str,
    implementation: str | None,
    arrays: tuple[Any, ...],
    topk: int,
    k_exponents: Array | None,
) -> Any:
    q, k, w, lo, hi = arrays
    contract.positive(function, topk=topk)
    floats = {"q": (q, "B T I J"), "k": (k, "B S J"), "w": (w, "B T I")}
    _, lo, hi = contract.bounded(function, floats, lo, hi)
    exponents = eight_bits.checked(function, q, k, k_exponents)
    q, k, w = lax.stop_gradient((q, k, w.astype(jnp.float32)))
    args = (q, k, w, lo, hi, topk)
    op = dispatch.Op("indexer_topk", function, IMPLEMENTATIONS, "dense")
    if exponents is not None:
        coded = (*args, exponents)
        is_taken = dispatch.would_run(op, "gpu", implementation, coded)
        args = (
            coded if is_taken else (*eight_bits.as_halves(q, k, exponents), *args[2:])
        )
    return dispatch.saved(dispatch.run(op, implementation, args))
