"""Decoding with a cache of latents and indexer keys, in pages or in one piece.

A sequence has a few queries (several under speculative decoding) and many cached rows.
Reading the rows takes most of the time, so kernels split the keys among programs. Not
differentiable.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8, UInt8

from pallas_kernels import contract, dispatch, eight_bits, latent_rows, selection
from pallas_kernels.decode import reference

IMPLEMENTATIONS = ("reference", "tpu", "gpu")


def decode_indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "pages s J"] | UInt8[Array, "pages s J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    page_table: Int[Array, "B n"] | None = None,
    *,
    topk: int,
    k_exponents: Int8[Array, "pages s"] | None = None,
    implementation: str | None = None,
) -> Int[Array, "B T K"]:
    """Indices of the top-k cached keys of each query; see `indexer_topk`.

    Args:
      q: indexer queries of the new tokens.
      k: cached keys: pages of s keys each, or without a page_table a row of s keys for
        each of the B sequences. Codes as in `indexer_topk`, or as uint8, their bytes:
        XLA for TPUs copies all of an array to give it another type.
      w: head weights, scales included.
      lo: first visible key, counted along the sequence.
      hi: end of the visible keys; cut to n * s if larger.
      page_table: page of each run of s tokens of a sequence.
      topk: keys to select.
      k_exponents: powers of two that scale the rows of k, if they are codes.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Returns:
      Positions along the sequence, ascending, padded with -1.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    name = "decode_indexer_topk"
    contract.positive(name, topk=topk)
    codes = k if k_exponents is None else eight_bits.of_bytes(k)
    floats = {"q": (q, "B T I J"), "w": (w, "B T I"), "k": (codes, "pages s J")}
    integers = {"lo": (lo, "B T"), "hi": (hi, "B T")}
    num_keys, page_table = _cached(name, floats, integers, page_table)
    lo, hi = contract.within(lo, hi, num_keys)
    exponents = eight_bits.checked(name, q, codes, k_exponents)
    op = dispatch.Op("decode", name, IMPLEMENTATIONS, "dense")
    args = (q, codes, w.astype(jnp.float32), lo, hi, page_table, topk)
    if exponents is not None:
        coded = (q, k, *args[2:], exponents)
        of_tpu = dispatch.would_run(op, "tpu", implementation, coded)
        is_taken = of_tpu and op.unsupported("tpu", coded) is None
        is_taken |= dispatch.would_run(op, "gpu", implementation, coded)
        args = coded if is_taken else _with_restored_keys(args, exponents)
    return dispatch.run(op, implementation, args)


def _with_restored_keys(args: tuple, exponents: Array) -> tuple:
    """Restores the keys of the B sequences for kernels that do not multiply codes."""
    q, k, w, lo, hi, page_table, topk = args
    # Bytes: XLA for CPUs would fetch rows of float8 from a copy of all pages.
    codes = reference.rows(lax.bitcast_convert_type(k, jnp.uint8), page_table)
    codes = lax.bitcast_convert_type(codes, k.dtype)
    exponents = reference.rows(exponents, page_table)
    return *eight_bits.as_halves(q, codes, exponents), w, lo, hi, None, topk


def decode_sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "pages s row"] | UInt8[Array, "pages s width"],
    indices: Int[Array, "B T K"],
    page_table: Int[Array, "B n"] | None = None,
    *,
    scale: float,
    value_dim: int,
    kv_codes: str | None = None,
    indices_are_sorted: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """Attends to the listed rows of the cache; see `sparse_mla`.

    Args:
      q: queries of the new tokens, in the latent space.
      kv: cached rows: pages of s rows each, or without a page_table s rows for each of
        the B sequences. Rows of floats, or of bytes as in `latent_rows.Form`: C codes,
        their scales, and as many numbers as q has more; the rest is padding.
      indices: positions along the sequence, a set as in `sparse_mla`.
      page_table: page of each run of s tokens of a sequence.
      scale: factor on q . kv.
      value_dim: C; values are the first C of each row.
      kv_codes: type of the codes in rows of bytes, float8_e4m3fn or int8.
      indices_are_sorted: promises lists in the order of `indexer_topk`'s, which saves
        sorting them; see `pallas_kernels.selection`.
      implementation: see IMPLEMENTATIONS; None for the best one.

    Raises:
      ValueError: if shapes or types do not fit each other.
      NotImplementedError: if a named implementation cannot take the arguments.
    """
    name = "decode_sparse_mla"
    contract.value_dim(name, value_dim, q.shape[-1])
    integers = {"indices": (indices, "B T K")}
    form = latent_rows.form(name, q, kv, value_dim, kv_codes)
    if form is None:
        floats, rows = {"q": (q, "B T N row"), "kv": (kv, "pages s row")}, {}
    else:
        floats, rows = {"q": (q, "B T N row")}, {"kv": (kv, "pages s width")}
    num_keys, page_table = _cached(name, floats, integers, page_table, rows)
    indices = indices.astype(jnp.int32)  # kernels compare them with the last key
    if not indices_are_sorted:
        indices = selection.as_sorted(indices, num_keys)
    args = (q, kv, indices, page_table, scale, value_dim)
    op = dispatch.Op("decode", name, IMPLEMENTATIONS, "listed")
    if form is None:
        return dispatch.run(op, implementation, args)
    form.check_width(name, kv)
    return dispatch.run(op, implementation, (*args, form))


def _cached(
    op: str,
    floats: contract.Arrays,
    integers: contract.Arrays,
    page_table: Array | None,
    rows_of_bytes: contract.Arrays | None = None,
) -> tuple[int, Array | None]:
    """Checks all shapes; returns the keys per sequence and an int32 page table."""
    rows = rows_of_bytes or {}
    if page_table is None:  # one row of keys per sequence
        own = lambda arrays: {
            n: (x, d.replace("pages", "B")) for n, (x, d) in arrays.items()
        }
        known = contract.sizes(op, own(floats), integers, rows_of_bytes=own(rows))
        return known["s"], None
    integers = {**integers, "page_table": (page_table, "B n")}
    known = contract.sizes(op, floats, integers, rows_of_bytes=rows)
    contract.positive(op, n=known["n"])
    return known["n"] * known["s"], page_table.astype(jnp.int32)
