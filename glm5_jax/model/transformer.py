"""GLM-5 whole: embedding, groups of scanned layers, last norm, MTP, head.

`Transformer` is a thin Linen module: it declares the parameters of `table` and calls
`forward`. Everything else here is a function of a plain dict of arrays.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, indexer, initial, layers, mtp
from glm5_jax.model.attention import mla


class LayerTrace(NamedTuple):
    """What a layer did, for caches, tests and curious people."""

    x: Float[Array, "B T D"]  # its output
    kv: mla.Latent
    index: indexer.Index | None  # its own, or the one that it reused


class Output(NamedTuple):
    """Of a forward pass over whole rows."""

    hidden: Float[Array, "B T D"]  # after the last norm
    aux: dict[str, dict[str, block_lib.BlockAux]]  # stacked over the scanned layers
    traces: dict[str, dict[str, LayerTrace]] | None  # likewise, if asked for
    context: context_lib.Context


def table(config: config_lib.ModelConfig) -> dict:
    """The parameter tree: shape, logical dims and initialiser of every array."""
    vocab, hidden = config.vocab_size, config.hidden_size
    params: dict[str, Any] = {"embed_tokens": layers.Param((vocab, hidden), ("V", "D"))}
    for g, group in enumerate(depth.layer_groups(config)):
        blocks = enumerate(group.unit)
        unit = {f"block_{p}": block_lib.table(config, kind) for p, kind in blocks}
        stack = functools.partial(layers.Param.stacked, repeats=group.repeats)
        params[f"layers_{g}"] = map_table(stack, unit)
    params["norm"] = layers.scale(hidden, "D")
    if config.has_mtp:
        params["mtp"] = mtp.table(config)
    params["lm_head"] = layers.Param((hidden, vocab), ("D", "V"))
    return params


def map_table(function: Any, tree: Any) -> Any:
    """Maps over the Params of a table."""
    return jax.tree.map(function, tree, is_leaf=_is_param)


def param_dims(config: config_lib.ModelConfig) -> dict:
    """Logical dims of every parameter, as the tree of parameters."""
    return map_table(lambda p: p.dims, table(config))


def cast(params: dict, config: config_lib.ModelConfig) -> dict:
    """Parameters in the dtypes that they are computed in.

    Matrices become config.dtype; norms, router and head weights float32. Gradients
    with respect to these take half the room of those of float32 parameters, and are
    as fine: what devices send each other of a matrix is in config.dtype anyway.
    """
    return layers.cast(params, table(config), config.dtype)


def abstract_params(config: config_lib.ModelConfig) -> dict:
    """Shape and dtype of every parameter, without any array."""
    return map_table(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype(config)), table(config)
    )


class Transformer(nn.Module):
    """GLM-5 as a Flax module; `apply` returns logits."""

    config: config_lib.ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of the next token at every position, float32."""
        params = {
            name: self.param(name, functools.partial(_init, self.config, entry))
            for name, entry in table(self.config).items()
        }
        out = forward(params, self.config, tokens, segment_ids, positions)
        return logits(params, self.config, out.hidden)


def init_params(config: config_lib.ModelConfig, key: Array) -> dict:
    """Initial parameters as a plain dict."""
    return nn.meta.unbox(_init(config, table(config), key))


def _init(config: config_lib.ModelConfig, entry: Any, key: Array) -> Any:
    """Boxed arrays of a table."""
    params, tree = jax.tree.flatten(entry, is_leaf=_is_param)
    boxed = [
        nn.LogicallyPartitioned(value, names=param.dims)
        for param, value in zip(
            params, initial.values(params, config, key), strict=True
        )
    ]
    return jax.tree.unflatten(tree, boxed)


def _is_param(node: Any) -> bool:
    return isinstance(node, layers.Param)


def forward(
    params: dict,
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    *,
    context: context_lib.Context | None = None,
    experts: Int[Array, "M B T K"] | None = None,
    with_indexer_loss: bool = False,
    with_traces: bool = False,
) -> Output:
    """Runs the stack over rows of packed documents.

    Args:
      params: of `table`.
      config: of the model.
      tokens: ids below vocab_size.
      segment_ids: document of each token, contiguous; 0 is padding. Default: one
        document a row.
      positions: of each token in its document. Default: 0, 1, 2, ...
      context: what would be made of the two, where these are not whole rows.
      experts: those that each mixture's router chose before, in the stack's order, to
        choose them again (router replay, arXiv 2510.11370). Default: it chooses.
      with_indexer_loss: computes each indexer's KL divergence.
      with_traces: returns every layer's output, latents and selection.
    """
    if context is None:
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        context = context_lib.make_context(config, segment_ids, positions)
    x = embedding.embed(params["embed_tokens"], config, tokens)
    index = None
    if config.attention != "dense" and not all(config.is_full_index_layer):
        index = indexer.empty(config, *tokens.shape, with_projections=with_indexer_loss)
    weights = kl_weights(config) if with_indexer_loss else None
    aux, traces, first = {}, {}, 0
    for g, group in enumerate(depth.layer_groups(config)):
        name = f"layers_{g}"
        unit = functools.partial(_unit, config, group.unit, context, with_traces)
        unit = layers.rematerialized(unit, config.remat_policy)
        own = None
        if weights is not None:
            own = weights[group.start :][: group.repeats * len(group.unit)]
            own = jnp.asarray(own.reshape(group.repeats, -1), jnp.float32)
        replayed = None
        if experts is not None:
            last = first + group.num_mixtures
            replayed = experts[first:last].reshape(
                group.repeats, -1, *experts.shape[1:]
            )
            first = last
        with jax.named_scope(name):
            (x, index), (aux[name], traces[name]) = lax.scan(
                unit, (x, index), (params[name], own, replayed)
            )
    hidden = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
    return Output(hidden, aux, traces if with_traces else None, context)


def logits(
    params: dict, config: config_lib.ModelConfig, hidden: Float[Array, "*b D"]
) -> Float[Array, "*b V"]:
    """Scores of the next token, float32."""
    head = params["lm_head"].astype(config.dtype)
    return jnp.einsum("...d,dv->...v", hidden, head, preferred_element_type=jnp.float32)


def kl_weights(config: config_lib.ModelConfig) -> np.ndarray:
    """Share of each layer in the loss of the indexer that it uses.

    An index used by m + 1 layers is trained against the mean of their attentions;
    1 / (m + 1) of each one's divergence has that gradient (arXiv 2603.12201).
    """
    owner = np.cumsum(config.is_full_index_layer) - 1
    return 1 / np.bincount(owner)[owner]


def _unit(
    config: config_lib.ModelConfig,
    kinds: tuple[depth.Kind, ...],
    context: context_lib.Context,
    with_traces: bool,
    carry: tuple,
    xs: tuple,
) -> tuple[tuple, tuple]:
    """The layers of one step of a scan."""
    x, shared = carry
    x = layers.named_input(x)
    params, weights, experts = xs
    aux, traces, index = {}, {}, shared
    replayed = iter(() if experts is None else experts)
    for p, kind in enumerate(kinds):
        name = f"block_{p}"
        out = block_lib.block(
            block_lib.fetched(params[name], config),
            config,
            x,
            context,
            index if not kind.owns_indexer else None,
            None if weights is None else weights[p],
            experts=next(replayed, None) if kind.has_experts else None,
        )
        x, index, aux[name] = out.x, out.index, out.aux
        traces[name] = LayerTrace(x, out.kv, index) if with_traces else None
    if shared is None:  # no layer shares an index: nothing to hand on
        index = None
    elif index is not None and weights is None:
        index = index._replace(q=None, k=None, w=None)
    return (x, index), (aux, traces)
