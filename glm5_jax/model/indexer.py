"""The lightning indexer of DeepSeek Sparse Attention: which keys a query attends to.

q = W_Iq c_q, k = LayerNorm(W_Ik x), both rotated on their first R dims;
I[t, s] = sum_i w[t, i] ReLU(q[t, i] . k[s]) in float32; the top-k of I are kept
(GLM-5, arXiv 2602.15763; DeepSeek-V3.2, arXiv 2512.02556). No gradient of the
language model reaches it: its inputs are constants.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import layers, rope
from glm5_jax.model import selection as selection_lib

K_NORM_EPS = 1e-6


class Projections(NamedTuple):
    """Queries, keys and head weights, from which an indexer computes its scores."""

    q: Float[Array, "B T I J"]  # rotated
    k: Float[Array, "B S J"]  # normalised and rotated
    w: Float[Array, "B T I"]  # head weights with both scales folded in


class Index(NamedTuple):
    """An indexer's outputs, which layers without an indexer reuse (IndexShare)."""

    projections: Projections | None  # None if neither a loss nor a cache needs them
    selection: selection_lib.Selection

    def without_projections(self) -> "Index":
        """Returns the selection alone."""
        return Index(None, self.selection)


def table(config: config_lib.ModelConfig) -> dict:
    """Declares the parameters of one indexer."""
    heads, dim = config.index_n_heads, config.index_head_dim
    hidden = config.hidden_size
    return {
        "wq_b": layers.Param((config.q_lora_rank, heads, dim), ("Q", "I", "J")),
        "wk": layers.Param((hidden, dim), ("D", "J")),
        "k_norm_scale": layers.scale(dim, "J"),
        "k_norm_bias": layers.bias(dim, "J"),
        "weights_proj": layers.Param((hidden, heads), ("D", "I"), is_float32=True),
    }


def project(
    params: dict[str, Array],
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    c_q: Float[Array, "B T Q"],
    context: context_lib.Context,
) -> Projections:
    """Projects hidden states and query latents, without gradients for either."""
    x, c_q = lax.stop_gradient((x, c_q))
    rotated = config.qk_rope_head_dim

    def halves(weight: Array) -> Array:
        first = rope.halves(weight[..., :rotated])
        return jnp.concatenate([first, weight[..., rotated:]], axis=-1)

    def turn(y: Array, cos: Array, sin: Array) -> Array:
        first = rope.rotate(y[..., :rotated], cos, sin)
        return jnp.concatenate([first, y[..., rotated:]], axis=-1)

    cos, sin = context.cos, context.sin
    q = layers.linear_to(halves, c_q, params["wq_b"])
    k = layers.layer_norm(
        layers.linear_to(halves, x, params["wk"]),
        halves(params["k_norm_scale"]),
        halves(params["k_norm_bias"]),
        K_NORM_EPS,
    )
    # XLA for GPUs (jax 0.10.2) fails to compile the norm fused with the rotation.
    k = lax.optimization_barrier(k)
    exact = lax.Precision.HIGHEST
    w = layers.linear(x.astype(jnp.float32), params["weights_proj"], precision=exact)
    w = w * (config.index_n_heads * config.index_head_dim) ** -0.5
    q = turn(q, cos[:, :, None], sin[:, :, None])
    return Projections(q, turn(k, cos, sin), w)


def select(
    params: dict[str, Array],
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    c_q: Float[Array, "B T Q"],
    context: context_lib.Context,
) -> Index:
    """Selects keys of whole documents by their scores; all keys where S <= K."""
    q, k, w = project(params, config, x, c_q, context)
    k = collectives.all_keys(k)
    selection: selection_lib.Selection = selection_lib.AllVisible()
    if selects(config, k.shape[1]):
        selection = selection_lib.top_keys(
            q,
            k,
            w,
            lo=context.lo,
            hi=context.hi,
            topk=config.index_topk,
            is_listed=bool(config.batch_invariant),  # as decoding lists them
        )
    return Index(Projections(q, k, w), selection)


def selects(config: config_lib.ModelConfig, num_keys: int) -> bool:
    """Returns whether attention over `num_keys` keys reads only selected ones.

    Batch-invariant attention always selects, so that it has only one form.
    """
    has_choice = bool(config.batch_invariant) or config.index_topk < num_keys
    return config.attention == "sparse" and has_choice


def empty(
    config: config_lib.ModelConfig, batch: int, tokens: int, with_projections: bool
) -> Index:
    """Returns zeros with the structure of what `select` returns: a scan's start."""
    heads, dim = config.index_n_heads, config.index_head_dim
    num_keys = tokens * collectives.size(collectives.CONTEXT)
    projections = None
    if with_projections:  # the loss of later layers needs them
        projections = Projections(
            q=jnp.zeros((batch, tokens, heads, dim), config.dtype),
            k=jnp.zeros((batch, num_keys, dim), config.dtype),
            w=jnp.zeros((batch, tokens, heads), jnp.float32),
        )
    selection: selection_lib.Selection = selection_lib.AllVisible()
    if selects(config, num_keys):
        is_listed = bool(config.batch_invariant)
        selection = selection_lib.empty(
            batch, tokens, num_keys, config.index_topk, is_listed
        )
    return Index(projections, selection)
