"""The lightning indexer of DeepSeek Sparse Attention: which keys a query attends to.

From hidden states x and MLA's query latents c_q it computes, for a query t and a key s,

    q[t, i] = W_q,i c_q[t]              of head i; RoPE on the first R dims
    k[s] = LayerNorm(W_k x[s])          one for all heads; RoPE likewise
    w[t, i] = (W_w x[t])[i] / sqrt(heads * dim)
    I[t, s] = sum_i w[t, i] ReLU(q[t, i] . k[s])    in float32

and query t keeps the index_topk keys with the largest I. This choice has no gradient,
so the indexer learns to imitate the attention: it minimises, in the mean over t,

    KL(p_t || softmax_s I[t, s])

over the selected keys (over all visible keys in the stage dsa_warmup), where p_t is the
mean over heads of the attention's probabilities. No gradient flows into p_t, x or c_q:
this loss trains the indexer's parameters alone, and no other loss reaches them.
attention/dsa.py computes it (GLM-5, arXiv 2602.15763; DeepSeek-V3.2, arXiv 2512.02556).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import layers, rope
from glm5_jax.model import selection as selection_lib
from pallas_kernels import eight_bits

K_NORM_EPS = 1e-6


class Projections(NamedTuple):
    """Queries, keys and head weights, from which an indexer computes its scores."""

    q: Float[Array, "B T I J"]  # rotated
    k: Float[Array, "B S J"]  # normalised and rotated
    w: Float[Array, "B T I"]  # head weights, divided by sqrt(heads * dim)


class Index(NamedTuple):
    """An indexer's outputs, which layers without an indexer reuse (IndexShare)."""

    projections: Projections | None  # for the loss and the cache; None if not needed
    selection: selection_lib.Selection


def table(config: config_lib.ModelConfig) -> dict:
    """Declares the parameters of one indexer."""
    heads, dim = config.index_n_heads, config.index_head_dim
    hidden = config.hidden_size
    return {
        "wq_b": layers.Param(
            (config.q_lora_rank, heads, dim), ("Q", "I", "J"), num_in=1
        ),
        "wk": layers.Param((hidden, dim), ("D", "J"), num_in=1),
        "k_norm_scale": layers.scale(dim, "J"),
        "k_norm_bias": layers.bias(dim, "J"),
        "weights_proj": layers.Param(
            (hidden, heads), ("D", "I"), is_float32=True, num_in=1
        ),
    }


def project(
    params: layers.Params,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    c_q: Float[Array, "B T Q"],
    context: context_lib.Context,
) -> Projections:
    """Computes q, k and w from x and c_q, without gradients for either."""
    x, c_q = lax.stop_gradient((x, c_q))
    rope_dim = config.qk_rope_head_dim  # rope.halves and rotate work on these alone

    def halves(w: Array) -> Array:
        first = rope.halves(w[..., :rope_dim])
        return jnp.concatenate([first, w[..., rope_dim:]], axis=-1)

    def rotate(y: Array, cos: Array, sin: Array) -> Array:
        first = rope.rotate(y[..., :rope_dim], cos, sin)
        return jnp.concatenate([first, y[..., rope_dim:]], axis=-1)

    cos, sin = context.cos, context.sin
    (q,) = layers.linear_of_columns(c_q, params["wq_b"], halves)
    (k,) = layers.linear_of_columns(x, params["wk"], halves)
    k = layers.layer_norm(
        k,
        halves(params["k_norm_scale"]),
        halves(params["k_norm_bias"]),
        K_NORM_EPS,
    )
    # XLA for GPUs (jax 0.10.2) fails to compile the norm fused with the rotation.
    k = lax.optimization_barrier(k)
    exact = lax.Precision.HIGHEST
    w = layers.linear(x.astype(jnp.float32), params["weights_proj"], precision=exact)
    w = w * (config.index_n_heads * config.index_head_dim) ** -0.5
    q, k = rotate(q, cos[:, :, None], sin[:, :, None]), rotate(k, cos, sin)
    if config.index_dtype == "fp8":
        q, k = _rounded(q), _rounded(k)
    return Projections(q, k, w)


def _rounded(x: Float[Array, "*n J"]) -> Float[Array, "*n J"]:
    """Returns the numbers that 8 bits hold; the gradient is that of x."""
    restored = eight_bits.restored(*eight_bits.rounded(x), x.dtype)
    return lax.stop_gradient(restored) + (x - lax.stop_gradient(x))


def as_scored(
    config: config_lib.ModelConfig, made: Projections
) -> tuple[Projections, Int[Array, "B S"] | None]:
    """Returns the numbers as kernels multiply them, and the exponents of 8-bit keys.

    With index_dtype "fp8" they are codes of the same numbers, which were rounded
    before; the factors of queries go into the head weights.
    """
    if config.index_dtype != "fp8":
        return made, None
    q, q_exponents = eight_bits.rounded(made.q)
    k, k_exponents = eight_bits.rounded(made.k)
    return Projections(q, k, made.w * eight_bits.power(q_exponents)), k_exponents


def select(
    params: layers.Params,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    c_q: Float[Array, "B T Q"],
    context: context_lib.Context,
) -> Index:
    """Selects keys of whole documents by their scores; all keys where S <= K."""
    made = project(params, config, x, c_q, context)
    made = made._replace(k=collectives.all_keys(made.k))  # of the whole row
    selection: selection_lib.Selection = selection_lib.AllVisible()
    if selects(config, made.k.shape[1]):  # never in dsa_warmup
        scored, exponents = as_scored(config, made)
        # True: lists, the encoding that decoding reads, for the same bits as decoding.
        # False: top_keys takes the encoding that is fastest for this length.
        is_listed, topk = bool(config.batch_invariant), config.index_topk
        selection = selection_lib.top_keys(
            *scored, exponents, context.lo, context.hi, topk, is_listed
        )
    return Index(made, selection)


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
