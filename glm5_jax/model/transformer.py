"""The whole model: embedding, groups of scanned layers, last norm, head.

GLM-5 has 3 dense layers, then 75 layers with experts. Each of these two groups is one
scan (one step: a call): params["layers_0"]["block_0"] has arrays [3, ...], and
params["layers_1"]["block_0"] arrays [75, ...]. In GLM-5 a step of the scan computes one
layer. In GLM-5.2 it computes four, block_0 to block_3: block_3 selects keys, which the
next step's block_0 to block_2 read again (IndexShare). depth.py makes the groups.

`forward` runs from the embedding to the last norm, `logits` is the head. Multi-token
prediction (MTP, mtp.py) runs after `forward`, for the losses only.

Parameters come as they are stored, sharded. Each layer gathers ("fetches") its own and
casts them, unless `cast` has cast all of them before, as in a training step.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from glm5_jax import collectives, depth
from glm5_jax import config as config_lib
from glm5_jax.model import attention as attention_lib
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, initial, layers, mtp, remat
from pallas_kernels import loops


class LayerTrace(NamedTuple):
    """A layer's intermediate results, for caches and tests."""

    x: Float[Array, "B T D"]  # its output
    attended: Any  # what its queries read, see the attention's file


class Output(NamedTuple):
    """The outputs of `forward`."""

    hidden: Float[Array, "B T D"]  # after the last norm
    aux: dict[str, dict[str, block_lib.BlockAux]]  # stacked over the scanned layers
    traces: dict[str, dict[str, LayerTrace]] | None  # likewise, if asked for
    context: context_lib.Context


def table(config: config_lib.ModelConfig) -> dict:
    """Declares the parameters: shape, logical dims and initialiser of each array."""
    vocab, hidden = config.vocab_size, config.hidden_size
    params: dict[str, Any] = {"embed_tokens": layers.Param((vocab, hidden), ("V", "D"))}
    for g, group in enumerate(depth.layer_groups(config)):
        unit = {
            f"block_{p}": block_lib.make(config, kind).table()
            for p, kind in enumerate(group.unit)
        }
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
    """Returns the logical dims of every parameter, as a tree."""
    return map_table(lambda p: p.dims, table(config))


def cast(params: dict, config: config_lib.ModelConfig) -> dict:
    """Casts parameters to their dtypes of computation.

    Matrices become config.dtype; norms, router and head weights float32. Gradients
    with respect to the cast parameters take half the memory of float32 ones and lose
    nothing, since devices exchange matrices in config.dtype anyway.
    """
    return layers.cast(params, table(config), config.dtype)


def abstract_params(config: config_lib.ModelConfig) -> dict:
    """Returns shape and dtype of every parameter, without any array."""
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
        """Returns the logits of the next token at every position, float32."""
        params = {
            name: self.param(name, functools.partial(_init, self.config, entry))
            for name, entry in table(self.config).items()
        }
        out = forward(params, self.config, tokens, segment_ids, positions)
        return logits(params, self.config, out.hidden)


def init_params(config: config_lib.ModelConfig, key: Array) -> dict:
    """Returns initial parameters as a plain dict."""
    return nn.meta.unbox(_init(config, table(config), key))


def _init(config: config_lib.ModelConfig, entry: Any, key: Array) -> Any:
    """Returns the boxed arrays of a table."""
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
    experts: Int[Array, "expert_layers B T K"] | None = None,
    with_indexer_loss: bool = False,
    with_traces: bool = False,
) -> Output:
    """Runs the stack over rows of packed documents.

    Args:
      params: as `table` declares them.
      config: of the model.
      tokens: ids below vocab_size.
      segment_ids: document of each token, contiguous; 0 is padding. Default: one
        document a row.
      positions: of each token in its document. Default: 0, 1, 2, ...
      context: replaces segment_ids and positions where a device holds only a part of
        each row: for each token cos and sin of RoPE, the visible keys lo to hi - 1, and
        is_token (False: padding). Default: it is made here, from whole rows.
      experts: experts that each router chose before, to use again (router replay, arXiv
        2510.11370). Default: the router chooses.
      with_indexer_loss: computes each indexer's KL divergence.
      with_traces: returns every layer's output and what its queries read.

    Raises:
      ValueError: both a context and segment_ids or positions are given.
    """
    if context is None:
        context = _whole_rows(config, tokens, segment_ids, positions)
    elif segment_ids is not None or positions is not None:
        raise ValueError("context replaces segment_ids and positions; leave them out.")
    x = embedding.embed(params["embed_tokens"], config, tokens)
    x, aux, traces = _stack(
        params, config, x, context, experts, with_indexer_loss, with_traces
    )
    hidden = layers.rms_norm(x, params["norm"], config.rms_norm_eps)
    return Output(hidden, aux, traces if with_traces else None, context)


def _stack(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
    experts: Int[Array, "expert_layers B T K"] | None,
    with_indexer_loss: bool,
    with_traces: bool,
) -> tuple[Float[Array, "B T D"], dict, dict]:
    """Returns the output of the last layer; auxiliary outputs and traces of each."""
    # The selected keys that a layer hands to the next (IndexShare); None in GLM-5.
    shared = attention_lib.first_shared(config, len(x), x.shape[1], with_indexer_loss)
    kl_by_layer = kl_weights(config) if with_indexer_loss else None  # 1 each in GLM-5
    aux, traces = {}, {}
    for g, group in enumerate(depth.layer_groups(config)):
        name = f"layers_{g}"
        blocks = tuple(block_lib.make(config, kind) for kind in group.unit)
        unit = functools.partial(_unit, blocks, context, with_traces)
        unit = remat.rematerialized(unit, config.remat_policy, group.repeats)
        # Of this group, each [steps of the scan, layers of a step, ...] or None.
        weights, replayed = _by_step(config, g, kl_by_layer, experts)
        with jax.named_scope(name):
            (x, shared), (aux[name], traces[name]) = loops.scan(
                unit, (x, shared), (params[name], weights, replayed)
            )
    return x, aux, traces


def _by_step(
    config: config_lib.ModelConfig,
    g: int,
    kl_by_layer: np.ndarray | None,
    experts: Int[Array, "expert_layers B T K"] | None,
) -> tuple[Array | None, Array | None]:
    """Cuts a group's part of values of layers for its scan: [steps, layers, ...]."""
    groups = depth.layer_groups(config)
    group, first = groups[g], sum(x.num_expert_layers for x in groups[:g])

    def cut(values: Array | np.ndarray, start: int, num: int) -> Array:
        part = values[start : start + num]
        return jnp.asarray(part.reshape(group.repeats, -1, *part.shape[1:]))

    num_layers = group.repeats * len(group.unit)
    return (
        None if kl_by_layer is None else cut(kl_by_layer, group.start, num_layers),
        None if experts is None else cut(experts, first, group.num_expert_layers),
    )


def _whole_rows(
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None,
    positions: Int[Array, "B T"] | None,
) -> context_lib.Context:
    """Makes the context of whole rows, with the defaults of `forward`."""
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return context_lib.make_context(config, segment_ids, positions)


def logits(
    params: dict, config: config_lib.ModelConfig, hidden: Float[Array, "B *n D"]
) -> Float[Array, "B *n V"]:
    """Returns the score of every word, float32.

    On a mesh, devices that share the vocabulary exchange their rows, score them against
    their own words, and send the scores back: B V numbers a device, for any number of
    devices.
    """
    head = collectives.fetched(params["lm_head"], ("D", "V"), config.dtype)
    head = head.astype(config.dtype)
    hidden = collectives.gather(hidden, collectives.WORD_ROWS, 0)
    scores = jnp.einsum(
        "...d,dv->...v", hidden, head, preferred_element_type=jnp.float32
    )
    # sharding.RULES cuts V over SHARES first and then over WORD_ROWS: join in reverse.
    last = scores.ndim - 1
    scores = collectives.exchange(scores, collectives.WORD_ROWS, split=0, joined=last)
    return collectives.gather(scores, collectives.SHARES, last)


def kl_weights(config: config_lib.ModelConfig) -> np.ndarray:
    """Returns the share of each layer in the loss of the indexer that it uses.

    All are 1 unless m later layers use an index again (IndexShare, arXiv 2603.12201).
    Such an index is trained against the mean of m + 1 attentions; 1 / (m + 1) of each
    one's divergence has that gradient. A layer without an index has the share 0.
    """
    reads = [kind.index != "none" for kind in depth.layer_kinds(config)]
    owner = np.cumsum(config.is_full_index_layer)
    readers = np.bincount(owner, weights=reads)[owner]
    return (reads / np.maximum(readers, 1)).astype(np.float32)


def _unit(
    blocks: tuple[block_lib.Block, ...],
    context: context_lib.Context,
    with_traces: bool,
    carry: tuple,
    xs: tuple,
) -> tuple[tuple, tuple]:
    """Runs the layers of one step of a scan, each on the output of the last.

    xs are, of this step: parameters, weights of its layers in the loss of the indexer,
    and experts that the routers of its layers shall choose again (None in training).
    """
    x, shared = carry
    x = remat.named(x, remat.INPUT)
    params, weights, experts = xs
    replayed = iter(() if experts is None else experts)  # an entry a layer with experts
    aux, traces = {}, {}
    for p, block in enumerate(blocks):
        name = f"block_{p}"
        out = block.forward(
            block.fetched(params[name]),
            x,
            context,
            shared,
            kl_weight=None if weights is None else weights[p],
            experts=next(replayed, None) if block.has_experts else None,
        )
        x, shared, aux[name] = out.x, out.shared, out.aux
        traces[name] = LayerTrace(x, out.attended) if with_traces else None
    return (x, shared), (aux, traces)
