"""DeepSeek Sparse Attention over a cache, in absorbed form.

The cache has a latent row for each token and layer ("kv"), and an indexer key for each
token and layer with an indexer ("k_index"). New tokens are compared with the latents of
the selected keys, so that no key or value of a head is ever restored.
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
from glm5_jax.model.attention import mla
from pallas_kernels import dispatch
from pallas_kernels import selection as forms

FEW = 8  # most new tokens of a sequence that a decoding kernel takes
_LANES = 128  # of a TPU's tile


def entries(
    config: config_lib.ModelConfig, owns_indexer: bool, capacity: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and type of what is cached of a sequence in one layer."""
    shapes = {"kv": (capacity, row_width(config))}
    if owns_indexer:
        shapes["k_index"] = (capacity, config.index_head_dim)
    dtype = jnp.dtype(config.dtype)
    return {name: jax.ShapeDtypeStruct(x, dtype) for name, x in shapes.items()}


def row_width(config: config_lib.ModelConfig) -> int:
    """Returns the width of a cached row: C + R, on a TPU rounded up to whole tiles.

    XLA would give an argument with other rows another layout to save their padding,
    and a program would change it back, which takes twice the cache's memory: 1.12 GiB
    for 4 layers of GLM-5.
    """
    size = config.kv_lora_rank + config.qk_rope_head_dim
    return -(-size // _LANES) * _LANES if dispatch.platform() == "tpu" else size


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
    width = reader.cache.entries["kv"].shape[-1]
    reader = reader.append("kv", padded(jnp.concatenate(kv, axis=-1), width))
    if index_params is not None:
        made = indexer.project(index_params, config, x, c_q, context)
        reader = _select(reader, made, context, config.index_topk)
    q = padded(mla.latent_queries(params, config, c_q, context), width)
    out = _attend(reader, q, context, config.softmax_scale, config.kv_lora_rank)
    return mla.from_latent(params, out), reader


def _select(
    reader: cache_lib.Reader,
    new: indexer.Projections,
    context: context_lib.Context,
    topk: int,
) -> cache_lib.Reader:
    """Caches the indexer's keys, and selects keys if the cache may have more than K."""
    reader = reader.append("k_index", new.k)
    if isinstance(reader.shared, selection_lib.AllVisible):
        return reader
    bounds = {"lo": context.lo, "hi": context.hi, "topk": topk}
    num_new = new.q.shape[1]
    if num_new > FEW:
        keys = reader.sequences("k_index")
        # Padding may lie beyond the end of the cache; a query sees only earlier keys.
        keys = jnp.pad(keys, [(0, 0), (0, num_new), (0, 0)])
        indices = pallas_kernels.indexer_topk(new.q, keys, new.w, **bounds)
    else:
        keys, page_table = reader.pages("k_index")
        indices = pallas_kernels.decode_indexer_topk(
            new.q, keys, new.w, page_table=page_table, **bounds
        )
    return dataclasses.replace(reader, shared=selection_lib.Listed(indices))


def _attend(
    reader: cache_lib.Reader,
    q: Float[Array, "b T N row"],
    context: context_lib.Context,
    scale: float,
    value_dim: int,
) -> Float[Array, "b T N C"]:
    """Attends in the latent space to the selected rows, or to all visible ones."""
    selection, sizes = reader.shared, {"scale": scale, "value_dim": value_dim}
    if isinstance(selection, selection_lib.Listed):
        if q.shape[1] <= FEW:
            rows, page_table = reader.pages("kv")
            return pallas_kernels.decode_sparse_mla(
                q, rows, selection.indices, page_table, **sizes
            )[0]
        rows = reader.sequences("kv")
        return pallas_kernels.sparse_mla(q, rows, selection.indices, **sizes)[0]
    return attend_to_visible(q, reader.sequences("kv"), context.lo, context.hi, **sizes)


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


def padded(x: Float[Array, "*n row"], size: int) -> Float[Array, "*n width"]:
    """Zero-pads the last axis."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
