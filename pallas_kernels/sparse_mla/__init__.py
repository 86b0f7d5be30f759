"""Attention in latent (multi-query) form over a list of keys per query.

o[t, n] = sum_s softmax_s(scale q[t, n] . kv[s]) kv[s, :C] over the keys s of t's list.
This is the absorbed form of Multi-head Latent Attention with DeepSeek Sparse Attention
(DeepSeek-V3.2, arXiv 2512.02556; GLM-5, arXiv 2602.15763). All heads read the same
rows, so a row is fetched once per query.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import contract, dispatch

IMPLEMENTATIONS = ("tiled", "tpu", "gpu", "reference")


def sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "B S row"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    value_dim: int,
    deterministic: bool = False,
    indices_are_sorted: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """Attends to the listed rows; differentiable in q and kv, through both outputs.

    Args:
      q: queries in the latent space, then their rotated part: row = C + R.
      kv: latent, then rotated key, of each token. In float32 beside half-precision q it
        is rounded to q's type, and has a float32 gradient, as sums over devices need.
      indices: rows of kv that each query attends to, a set: order and repetition count
        for nothing, and entries that name no row, such as -1, are padding. An empty
        list gives zeros and a log-sum-exp of zero.
      scale: factor on q . kv.
      value_dim: C; values are the first C of each row.
      deterministic: sums the gradient of kv in the same order in every run; costs time
        and memory where atomics are faster.
      indices_are_sorted: promises lists in the order of `indexer_topk`'s, which saves
        sorting them; see `pallas_kernels.selection`.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Returns:
      The outputs, and the log-sum-exp of the scaled scores in float32.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    floats = {"q": (q, "B T N row"), "kv": (kv, "B S row")}
    known, indices = contract.listed("sparse_mla", floats, indices, indices_are_sorted)
    contract.value_dim("sparse_mla", value_dim, known["row"])
    args = (q, kv, indices, scale, value_dim, deterministic)
    op = dispatch.Op("sparse_mla", "sparse_mla", IMPLEMENTATIONS)
    return dispatch.run(op, implementation, args)
