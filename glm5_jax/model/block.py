"""One decoder layer: x + attention(norm(x)), then x + ffn(norm(x))."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels
from glm5_jax import collectives, depth
from glm5_jax import config as config_lib
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import indexer, layers, moe
from glm5_jax.model.attention import mla
from pallas_kernels import selection


class BlockAux(NamedTuple):
    """What a layer tells besides its output; None where it does not apply."""

    indexer_kl: Float[Array, ""] | None  # mean over tokens
    routing: moe.Routing | None


class BlockOutput(NamedTuple):
    """A layer's output, and what the next layers, a cache or the losses want."""

    x: Float[Array, "B T D"]
    index: indexer.Index | None
    kv: mla.Latent
    aux: BlockAux


def table(config: config_lib.ModelConfig, kind: depth.Kind) -> dict:
    """Parameters of a layer of a kind (glm5_jax/depth.py)."""
    hidden = config.hidden_size
    params = {
        "input_layernorm": layers.scale(hidden, "D"),
        "self_attn": mla.table(config),
        "post_attention_layernorm": layers.scale(hidden, "D"),
    }
    if not kind.has_experts:
        width = config.intermediate_size
        params["mlp"] = layers.swiglu_table(hidden, width)
    else:
        params["mlp"] = moe.table(config)
    if kind.owns_indexer:
        params["indexer"] = indexer.table(config)
    return params


def fetched(params: dict, config: config_lib.ModelConfig) -> dict:
    """A layer's parameters as it computes with them, from all devices.

    Matrices are in the activations' dtype; norms, router and head weights stay.
    """
    is_dense, has_indexer = "gate" not in params["mlp"], "indexer" in params
    kind = depth.Kind(
        "dense" if is_dense else "experts", "own" if has_indexer else "shared"
    )
    return layers.fetched(params, table(config, kind), config.dtype)


def block(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
    index: indexer.Index | None = None,
    kl_weight: Float[Array, ""] | None = None,
    kv: mla.Latent | None = None,
    experts: Int[Array, "B T K"] | None = None,
) -> BlockOutput:
    """Runs a layer over whole documents.

    Args:
      params: of `table`, `fetched`.
      config: of the model.
      x: hidden states.
      context: positions and documents.
      index: selection to reuse; None lets the layer's own indexer select.
      kl_weight: share of this layer in its indexer's loss; None computes no loss.
      kv: latents to attend to instead of the layer's own (later MTP steps).
      experts: to send each token to, instead of the router's choice.
    """
    h = layers.rms_norm(x, params["input_layernorm"], config.rms_norm_eps)
    c_q = mla.query_latent(params["self_attn"], config, h)
    if config.attention != "dense" and index is None:
        with jax.named_scope("indexer"):
            index = indexer.select(params["indexer"], config, h, c_q, context)
    selected = None if index is None else index.selected
    with jax.named_scope("attention"):
        if kv is None:
            kv = mla.latent(params["self_attn"], config, h, context)
            kv = mla.Latent(*map(collectives.all_keys, kv))
        out, main = mla.attend(params["self_attn"], config, c_q, kv, context, selected)
    kl = None
    if index is not None and kl_weight is not None:
        with jax.named_scope("indexer_loss"):
            kl = kl_weight * _indexer_kl(config, main, index, context)
    out, routing = feed_forward(params, config, x + out, context, experts)
    return BlockOutput(out, index, kv, BlockAux(kl, routing))


def feed_forward(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
    experts: Int[Array, "B T K"] | None = None,
) -> tuple[Float[Array, "B T D"], moe.Routing | None]:
    """The second half of a layer: a dense SwiGLU or the experts."""
    h = layers.rms_norm(x, params["post_attention_layernorm"], config.rms_norm_eps)
    if "gate" not in params["mlp"]:
        with jax.named_scope("mlp"):
            return x + layers.swiglu(params["mlp"], h), None
    with jax.named_scope("moe"):
        out, routing = moe.moe(params["mlp"], config, h, context.is_token, experts)
    return x + out, routing


def decode(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
    read: cache_lib.Reader,
) -> tuple[Float[Array, "B T D"], cache_lib.Reader, moe.Routing | None]:
    """Runs a layer over new tokens against a cache, in absorbed form.

    Args:
      params: of `table`.
      config: of the model.
      x: hidden states of the new tokens.
      context: their positions; lo .. hi - 1 are the cached keys that each may see.
      read: the cache, see glm5_jax/model/cache.py.
    """
    params = fetched(params, config)
    attn = params["self_attn"]
    h = layers.rms_norm(x, params["input_layernorm"], config.rms_norm_eps)
    c_q = mla.query_latent(attn, config, h)
    kv = mla.latent(attn, config, h, context)
    read = read.append(jnp.concatenate(kv, axis=-1))
    if config.attention == "sparse" and "indexer" in params:
        q, k, w = indexer.project(params["indexer"], config, h, c_q, context)
        read = read.select(q, k, w, context, config.index_topk)
    q = mla.latent_queries(attn, config, c_q, context)
    out = read.attend(q, context, config.softmax_scale, config.kv_lora_rank)
    out = mla.from_latent(attn, out)
    out, routing = feed_forward(params, config, x + out, context)
    return out, read.next(), routing


def _indexer_kl(
    config: config_lib.ModelConfig,
    main: tuple[Array, Array, Array],
    index: indexer.Index,
    context: context_lib.Context,
) -> Float[Array, ""]:
    """KL of the indexer from the attention, mean over the tokens of the batch."""
    projections, scale = (index.q, index.k, index.w), config.softmax_scale
    weight = context.is_token.astype(jnp.float32)
    if selection.is_list(index.selected):
        main = mla.all_heads(main, is_latent=True)
        loss = pallas_kernels.sparse_indexer_kl_loss(
            main, projections, index.selected, weight, scale=scale
        )
    else:
        main = mla.all_heads(main, is_latent=False)
        bounds = (context.lo, context.hi, index.selected)
        loss = pallas_kernels.indexer_kl_loss(
            main, projections, *bounds, weight, scale=scale
        )
    loss, weight = collectives.total((loss, jnp.sum(weight)), collectives.TOKENS)
    return loss / jnp.maximum(weight, 1)
