"""DeepSeek Sparse Attention over a cache, in absorbed form.

The cache has a latent row for each token and layer ("kv"), and an indexer key for each
token and layer with an indexer ("k_index"). New tokens are compared with the latents of
the selected keys, so that no key or value of a head is ever restored. Rows may have
8 bits a number (cache_rows.py); ops restore those that they need where no kernel reads
the codes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels
from glm5_jax import config as config_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import indexer, layers
from glm5_jax.model import selection as selection_lib
from glm5_jax.model.attention import cache_rows, mla
from pallas_kernels import eight_bits
from pallas_kernels import selection as forms

FEW = 8  # most new tokens of a sequence that a decoding kernel takes


def entries(
    config: config_lib.ModelConfig, owns_indexer: bool, capacity: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and type of what is cached of a sequence in one layer."""
    found = {"kv": cache_rows.of_latents(config).entry(capacity)}
    if owns_indexer:
        found |= cache_rows.index_entries(config, capacity)
    return found


def decode(
    params: layers.Params,
    index_params: layers.Params | None,
    config: config_lib.ModelConfig,
    x: Float[Array, "b T D"],
    context: context_lib.Context,
    reader: cache_lib.Reader,
) -> tuple[Float[Array, "b T D"], cache_lib.Reader]:
    """Runs the attention of new tokens; see `protocol.Attention.decode`.

    Args:
      params: of the attention.
      index_params: of the layer's indexer; None if it uses the selection before it.
      config: of the model.
      x: normed hidden states of the new tokens.
      context: their positions and visible keys.
      reader: the cache; its `shared` is the selection that layers share.
    """
    c_q = mla.query_latent(params, config, x)
    kv = mla.latent(params, config, x, context)
    form = cache_rows.of_latents(config)
    reader = reader.append("kv", form.store(jnp.concatenate(kv, axis=-1)))
    if index_params is not None:
        made = indexer.project(index_params, config, x, c_q, context)
        reader = _select(reader, config, made, context)
    q = mla.latent_queries(params, config, c_q, context)
    out = _attend(reader, config, q, context)
    return mla.from_latent(params, out), reader


def _select(
    reader: cache_lib.Reader,
    config: config_lib.ModelConfig,
    new: indexer.Projections,
    context: context_lib.Context,
) -> cache_lib.Reader:
    """Caches the indexer's keys, and selects keys if the cache may have more than K."""
    for name, rows in cache_rows.of_index_keys(config, new.k).items():
        reader = reader.append(name, rows)
    if isinstance(reader.shared, selection_lib.AllVisible):
        return reader
    if new.q.shape[1] > FEW:
        indices = _topk(reader, config, new, context)
    else:
        indices = _topk_of_few(reader, config, new, context)
    return dataclasses.replace(reader, shared=selection_lib.Listed(indices))


def _topk(
    reader: cache_lib.Reader,
    config: config_lib.ModelConfig,
    new: indexer.Projections,
    context: context_lib.Context,
) -> Int[Array, "b T K"]:
    """Lists the best keys of many new tokens, as in training."""
    num_new = new.q.shape[1]
    # Padding may lie beyond the end of the cache; a query sees only earlier keys.
    keys, *exponents = (
        jnp.pad(rows, [(0, 0), (0, num_new), *[(0, 0)] * (rows.ndim - 2)])
        for rows in map(reader.sequences, cache_rows.index_entries(config, 1))
    )
    new, _ = indexer.as_scored(config, new)
    return pallas_kernels.indexer_topk(
        new.q,
        eight_bits.of_bytes(keys),
        new.w,
        context.lo,
        context.hi,
        topk=config.index_topk,
        k_exponents=exponents[0] if exponents else None,
    )


def _topk_of_few(
    reader: cache_lib.Reader,
    config: config_lib.ModelConfig,
    new: indexer.Projections,
    context: context_lib.Context,
) -> Int[Array, "b T K"]:
    """Lists the best keys of few new tokens, which an op finds in all pages."""
    names = cache_rows.index_entries(config, 1)
    (keys, page_table), *exponents = map(reader.pages, names)
    new, _ = indexer.as_scored(config, new)
    return pallas_kernels.decode_indexer_topk(
        new.q,
        keys,
        new.w,
        context.lo,
        context.hi,
        page_table,
        topk=config.index_topk,
        k_exponents=exponents[0][0] if exponents else None,
    )


def _attend(
    reader: cache_lib.Reader,
    config: config_lib.ModelConfig,
    q: Float[Array, "b T N row"],
    context: context_lib.Context,
) -> Float[Array, "b T N C"]:
    """Attends in the latent space to the selected rows, or to all visible ones."""
    form, selection = cache_rows.of_latents(config), reader.shared
    sizes = {"scale": config.softmax_scale, "value_dim": config.kv_lora_rank}
    listed = {**sizes, "indices_are_sorted": True}
    padded = cache_rows.padded(q, form.num_numbers)
    if isinstance(selection, selection_lib.Listed):
        if q.shape[1] <= FEW:
            rows, page_table = reader.pages("kv")
            return pallas_kernels.decode_sparse_mla(
                padded if form.codes is None else q,
                rows,
                selection.indices,
                page_table,
                kv_codes=form.codes,
                **listed,
            )[0]
        rows = form.restore(reader.sequences("kv"))
        return pallas_kernels.sparse_mla(padded, rows, selection.indices, **listed)[0]
    rows = form.restore(reader.sequences("kv"))
    return attend_to_visible(padded, rows, context.lo, context.hi, **sizes)


def attend_to_visible(
    q: Float[Array, "b T N row"],
    kv: Float[Array, "b S row"],
    lo: Int[Array, "b T"],
    hi: Int[Array, "b T"],
    *,
    scale: float,
    value_dim: int,
) -> Float[Array, "b T N C"]:
    """Attends in the latent space to the rows lo to hi - 1 of each query."""
    keep = forms.visible(lo, hi, kv.shape[1])
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = dot("btnx,bsx->btns", q, kv)  # x: a row
    scores = jnp.where(keep[:, :, None], scores * scale, -1e30)
    probs = jax.nn.softmax(scores, axis=-1).astype(kv.dtype)
    return jnp.einsum("btns,bsc->btnc", probs, kv[..., :value_dim])
