"""Multi-token prediction: one module, applied several times (GLM-5 2.1, Table 2).

Step k joins the embedding of token i + k with the hidden state of step k - 1 and runs
one more expert layer: h_k = layer(W [norm(emb(t_{i+k})); norm(h_{k-1})]), which
predicts token i + k + 1 through the main head. h_0 is the main model's hidden state
after its last norm, h_k is passed on after shared_head.norm (Megatron, SGLang).

The paper compares one shared module with three: with num_nextn_predict_layers > 1 step
k has the k-th module of a stack (`_separate_steps`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, layers, remat
from pallas_kernels import loops


def table(config: config_lib.ModelConfig) -> dict:
    """Declares the module's parameters; embedding and head are the main model's."""
    hidden = config.hidden_size
    module = {
        "enorm": layers.scale(hidden, "D"),
        "hnorm": layers.scale(hidden, "D"),
        "eh_proj": layers.Param((2 * hidden, hidden), ("D+D", "D")),
        "block": block_lib.make(config, depth.mtp_kind(config)).table(),
        "norm": layers.scale(hidden, "D"),
    }
    if (num_modules := config.num_nextn_predict_layers) == 1:
        return module
    return jax.tree.map(lambda param: param.stacked(num_modules), module)


def steps(
    params: dict,
    config: config_lib.ModelConfig,
    embed_tokens: Float[Array, "v d"],
    hidden: Float[Array, "B T D"],
    tokens_ahead: Int[Array, "k B T"],
    context: context_lib.Context,
    kl_weight: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "k B T D"], block_lib.BlockAux]:
    """Runs a step for each of `tokens_ahead`, after `transformer.forward`.

    Near the end of a document the token ahead belongs to the next one; those
    positions see only the past, and the losses skip them.

    Args:
      params: of `table`, as stored.
      config: of the model.
      embed_tokens: the main model's embedding [V, D], as stored.
      hidden: the main model's states after its last norm.
      tokens_ahead: `ahead` of the tokens.
      context: positions and documents.
      kl_weight: of the indexer's loss; None computes none.

    Returns:
      States for the head, and the layer's auxiliary outputs, stacked over steps.
    """
    if config.num_nextn_predict_layers > 1:
        return _separate_steps(
            params, config, embed_tokens, hidden, tokens_ahead, context, kl_weight
        )
    # The module's gradients are finished before the layers' begin: otherwise they stay
    # live, unsharded.
    params, hidden = lax.optimization_barrier((params, hidden))
    own = {name: p for name, p in table(config).items() if name != "block"}
    # Fetched once for all steps: otherwise XLA sums their gradients in float32, as
    # unsharded matrices.
    own = layers.fetched({name: params[name] for name in own}, own, config.dtype)
    block = block_lib.make(config, depth.mtp_kind(config))
    params = {**own, "block": block.fetched(params["block"])}
    step = functools.partial(_step, params, block, embed_tokens, context, kl_weight)
    # With a shared index the first step is not in the loop of the others.
    num_looped = 1 if config.index_share_for_mtp_iteration else len(tokens_ahead)
    step = remat.rematerialized(step, config.remat_policy, num_looped)

    def later(h: Array, tokens: Array, attended: Any = None) -> tuple[Array, tuple]:
        h, aux, _ = step(h, tokens, attended)
        return h, (h, aux)

    if not config.index_share_for_mtp_iteration:
        return loops.scan(later, hidden, tokens_ahead)[1]
    # Later steps read the latents of the first step, with its index.
    h, aux, attended = step(hidden, tokens_ahead[0])
    later = functools.partial(later, attended=attended)
    rest = loops.scan(later, h, tokens_ahead[1:])[1]
    return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), (h, aux), rest)


def _separate_steps(
    params: dict,
    config: config_lib.ModelConfig,
    embed_tokens: Float[Array, "v d"],
    hidden: Float[Array, "B T D"],
    tokens_ahead: Int[Array, "k B T"],
    context: context_lib.Context,
    kl_weight: Float[Array, ""] | None,
) -> tuple[Float[Array, "k B T D"], block_lib.BlockAux]:
    """Runs step k with the k-th module; steps after the last module repeat it."""
    num_modules, num_steps = config.num_nextn_predict_layers, len(tokens_ahead)
    own = np.minimum(np.arange(num_steps), num_modules - 1)
    alone = dataclasses.replace(config, num_nextn_predict_layers=1)

    def step(h: Array, xs: tuple[Array, dict]) -> tuple[Array, tuple]:
        tokens, module = xs
        made = steps(module, alone, embed_tokens, h, tokens[None], context, kl_weight)
        state, aux = jax.tree.map(lambda x: x[0], made)
        return state, (state, aux)

    modules = jax.tree.map(lambda x: x[own], params)
    return lax.scan(step, hidden, (tokens_ahead, modules))[1]


def ahead(x: Array, num_steps: int) -> Array:
    """Returns num_steps copies of x [B, T]; copy k - 1 has x[i + k] at i."""
    return jnp.stack([jnp.roll(x, -k, axis=1) for k in range(1, num_steps + 1)])


def joined(
    params: dict,
    config: config_lib.ModelConfig,
    embed_tokens: Float[Array, "v d"],
    tokens: Int[Array, "B T"],
    h: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """Returns the layer's input: of the tokens ahead, and of the step before."""
    eps = config.rms_norm_eps
    x = embedding.embed(embed_tokens, config, tokens)
    pair = (
        layers.rms_norm(x, params["enorm"], eps),
        layers.rms_norm(h, params["hnorm"], eps),
    )
    return layers.linear(jnp.concatenate(pair, axis=-1), params["eh_proj"])


def _step(
    params: dict,
    block: block_lib.Block,
    embed_tokens: Float[Array, "v d"],
    context: context_lib.Context,
    kl_weight: Float[Array, ""] | None,
    h: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    attended: Any = None,
) -> tuple[Array, block_lib.BlockAux, Any]:
    """Runs one step: its normed state, auxiliary outputs, and what its queries read."""
    config = block.config
    x = joined(params, config, embed_tokens, tokens, h)
    out = block.forward(
        params["block"], x, context, kl_weight=kl_weight, attended=attended
    )
    return (
        layers.rms_norm(out.x, params["norm"], config.rms_norm_eps),
        out.aux,
        out.attended,
    )
