"""Attention in latent (multi-query) form over a list of keys for each query.

o[t, n] = sum_s softmax_s(scale q[t, n] . kv[s]) kv[s, :C] over the keys s of t's list:
the absorbed form of Multi-head Latent Attention under DeepSeek Sparse Attention
(DeepSeek-V3.2, arXiv 2512.02556; GLM-5, arXiv 2602.15763). Every head reads the same
rows, so a row is fetched once a query.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch

IMPLEMENTATIONS = ("tiled", "tpu", "gpu", "reference")


def sparse_mla(
    q: Float[Array, "B T N c"],
    kv: Float[Array, "B S c"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    value_dim: int,
    deterministic: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """Attends to the listed rows; differentiable in q and kv, through both outputs.

    Args:
      q: queries in the latent space, then their rotated part: c = C + R.
      kv: latent, then rotated key, of each token.
      indices: rows of kv, strictly ascending, padded with -1 at the end. A query
        without any gives zeros, and a log-sum-exp of zero.
      scale: factor on q . kv.
      value_dim: C; values are the first C of each row.
      deterministic: sum the gradient of kv in an order that does not change from run
        to run; where atomics are the faster way it costs time and memory.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Returns:
      The outputs, and the log-sum-exp of the scaled scores in float32.
    """
    args = (q, kv, indices, scale, value_dim, deterministic)
    run = dispatch.choose("sparse_mla", implementation, IMPLEMENTATIONS, *args)
    return run(*args)
