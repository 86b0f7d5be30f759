"""Decoding against a cache of latents and indexer keys, in pages or in one piece.

A few queries a sequence (several under speculative decoding) against many cached rows:
what costs is reading them, so kernels split the keys among programs. Not
differentiable.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch

IMPLEMENTATIONS = ("reference", "tpu", "gpu")


def decode_indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "P s J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    page_table: Int[Array, "B n"] | None = None,
    *,
    topk: int,
    implementation: str | None = None,
) -> Int[Array, "B T K"]:
    """Indices of the top-k cached keys of each query; see `indexer_topk`.

    Args:
      q: indexer queries of the new tokens.
      k: cached keys: P pages of s, or with page_table None a row of s for each of the
        B sequences.
      w: head weights, scales included.
      lo: first visible key, counted along the sequence.
      hi: end of the visible keys, at most n * s.
      page_table: page of each run of s tokens of a sequence.
      topk: keys to select.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Returns:
      Positions along the sequence, ascending, padded with -1.
    """
    args = (q, k, w, lo, hi, page_table, topk)
    run = dispatch.choose(
        "decode", implementation, IMPLEMENTATIONS, *args, function="decode_indexer_topk"
    )
    return run(*args)


def decode_sparse_mla(
    q: Float[Array, "B T N c"],
    kv: Float[Array, "P s c"],
    indices: Int[Array, "B T K"],
    page_table: Int[Array, "B n"] | None = None,
    *,
    scale: float,
    value_dim: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """Attends to the listed rows of the cache; see `sparse_mla`.

    Args:
      q: queries of the new tokens, in the latent space.
      kv: cached rows: P pages of s, or with page_table None a row of s for each of the
        B sequences.
      indices: positions along the sequence, padded with -1.
      page_table: page of each run of s tokens of a sequence.
      scale: factor on q . kv.
      value_dim: C; values are the first C of each row.
      implementation: see IMPLEMENTATIONS; None for the best one.
    """
    args = (q, kv, indices, page_table, scale, value_dim)
    run = dispatch.choose(
        "decode", implementation, IMPLEMENTATIONS, *args, function="decode_sparse_mla"
    )
    return run(*args)
