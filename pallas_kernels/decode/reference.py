"""The definition: joins the pages, then runs the op over the whole sequence."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8

from pallas_kernels import latent_rows
from pallas_kernels.indexer_topk import reference as indexer
from pallas_kernels.sparse_mla import reference as attention


def rows(
    pages: Shaped[Array, "pages s *width"], page_table: Int[Array, "B n"] | None
) -> Shaped[Array, "B S *width"]:
    """Returns the cache of every sequence in one piece."""
    if page_table is None:
        return pages
    rows = pages[page_table]  # [B, n, s, *width]
    return rows.reshape(len(rows), -1, *pages.shape[2:])


def decode_indexer_topk(
    q: Float[Array, "B T I J"],
    k: Float[Array, "pages s J"],
    w: Float[Array, "B T I"],
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    page_table: Int[Array, "B n"] | None,
    topk: int,
) -> Int[Array, "B T K"]:
    """See `pallas_kernels.decode_indexer_topk`."""
    return indexer.indexer_topk(q, rows(k, page_table), w, lo, hi, topk)


def decode_sparse_mla(
    q: Float[Array, "B T N row"],
    kv: Float[Array, "pages s row"] | UInt8[Array, "pages s width"],
    indices: Int[Array, "B T K"],
    page_table: Int[Array, "B n"] | None,
    scale: float,
    value_dim: int,
    form: latent_rows.Form | None = None,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B N T"]]:
    """See `pallas_kernels.decode_sparse_mla`; fetches only the listed rows."""
    rows, is_key = listed(kv, indices, page_table)
    rows = rows if form is None else form.restored(rows)
    return attention.attend(q, rows, is_key, scale, value_dim)


def listed(
    kv: Shaped[Array, "pages s width"],
    indices: Int[Array, "B T K"],
    page_table: Int[Array, "B n"] | None,
) -> tuple[Shaped[Array, "B T K width"], Bool[Array, "B T K"]]:
    """Fetches listed rows, any row for an entry that names none; which name one."""
    sequence = jnp.arange(indices.shape[0])[:, None, None]
    size = kv.shape[1]
    num_keys = size * (1 if page_table is None else page_table.shape[1])
    is_key = (indices >= 0) & (indices < num_keys)
    position = jnp.where(is_key, indices, 0)
    if page_table is not None:
        sequence, position = page_table[sequence, position // size], position % size
    return kv[sequence, position], is_key
