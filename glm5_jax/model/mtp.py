"""Multi-token prediction: one module, applied several times (GLM-5 2.1, Table 2).

Step k joins the embedding of token i + k with the hidden state of step k - 1 and runs
one more expert layer: h_k = layer(W [norm(emb(t_{i+k})); norm(h_{k-1})]), which
predicts token i + k + 1 through the main head. h_0 is the main model's hidden state
after its last norm, h_k is passed on after shared_head.norm (Megatron, SGLang).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import block as block_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import embedding, layers


def table(config: config_lib.ModelConfig) -> dict:
    """Parameters of the module; embedding and head are the main model's."""
    hidden = config.hidden_size
    return {
        "enorm": layers.scale(hidden, "D"),
        "hnorm": layers.scale(hidden, "D"),
        "eh_proj": layers.Param((2 * hidden, hidden), ("D+D", "D")),
        "block": block_lib.table(config, depth.MTP),
        "norm": layers.scale(hidden, "D"),
    }


def steps(
    params: dict,
    config: config_lib.ModelConfig,
    embed_tokens: Float[Array, "v d"],
    hidden: Float[Array, "B T D"],
    tokens_ahead: Int[Array, "k B T"],
    context: context_lib.Context,
    kl_weight: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "k B T D"], block_lib.BlockAux]:
    """Hidden states of config.mtp_num_steps steps, ready for the head.

    Near the end of a document the token ahead belongs to the next one; those
    positions see only the past and the losses leave them out.

    Args:
      params: of `table`.
      config: of the model.
      embed_tokens: the main model's embedding [V, D].
      hidden: the main model's states after its last norm.
      tokens_ahead: `ahead` of the tokens.
      context: positions and documents.
      kl_weight: of the indexer's loss; None computes none.

    Returns:
      States [steps, B, T, D], and the layer's auxiliary values, stacked over steps.
    """
    # The module's gradients are done before the layers' begin: else they wait, whole.
    params, hidden = lax.optimization_barrier((params, hidden))
    own = {name: p for name, p in table(config).items() if name != "block"}
    # Once for all steps: else XLA sums their gradients in float32, as whole matrices.
    own = layers.fetched({name: params[name] for name in own}, own, config.dtype)
    params = {**own, "block": block_lib.fetched(params["block"], config)}
    step = functools.partial(_step, params, config, embed_tokens, context, kl_weight)
    step = layers.rematerialized(step, config.remat_policy)

    def later(
        h: Array, tokens: Array, shared: tuple | None = None
    ) -> tuple[Array, tuple]:
        h, aux, _ = step(h, tokens, shared)
        return h, (h, aux)

    if not config.index_share_for_mtp_iteration:
        return lax.scan(later, hidden, tokens_ahead)[1]
    # The first step's index and latents serve the later ones.
    h, aux, shared = step(hidden, tokens_ahead[0])
    rest = lax.scan(functools.partial(later, shared=shared), h, tokens_ahead[1:])[1]
    return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), (h, aux), rest)


def ahead(x: Array, num_steps: int) -> Array:
    """Entry k - 1 holds at position i what x [B, T] holds at i + k."""
    return jnp.stack([jnp.roll(x, -k, axis=1) for k in range(1, num_steps + 1)])


def _step(
    params: dict,
    config: config_lib.ModelConfig,
    embed_tokens: Float[Array, "v d"],
    context: context_lib.Context,
    kl_weight: Float[Array, ""] | None,
    h: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    shared: tuple | None = None,
) -> tuple[Array, block_lib.BlockAux, tuple]:
    """Runs one step: its normed state, the layer's auxiliary values, index, latents."""
    eps = config.rms_norm_eps
    pair = [
        layers.rms_norm(
            embedding.embed(embed_tokens, config, tokens), params["enorm"], eps
        ),
        layers.rms_norm(h, params["hnorm"], eps),
    ]
    joined = jnp.concatenate(pair, axis=-1)
    x = layers.linear(joined, params["eh_proj"])
    index, kv = shared or (None, None)
    out = block_lib.block(params["block"], config, x, context, index, kl_weight, kv)
    state = layers.rms_norm(out.x, params["norm"], eps)
    return state, out.aux, (out.index, out.kv)
