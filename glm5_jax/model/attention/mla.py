"""Multi-head Latent Attention: keys and values of all heads are made of one latent c.

For each token s, a head's key is [W_UK c_s | k_rope_s] and its value W_UV c_s, with
matrices of that head (`k_b_proj`, `v_b_proj`). k_rope, of R dims, is one key for all
heads, rotated by its position (RoPE). Queries are made of a latent of their own, c_q.
Attention has two forms with the same result, because for each head

    scores:  q . (W_UK c_s) = (W_UK^T q) . c_s
    output:  sum_s p_s (W_UV c_s) = W_UV (sum_s p_s c_s)

The expanded form computes the left sides, with a key and a value for each head. In
GLM-5 a pair of query and key costs H + O = 256 + 256 multiplications per head, and
many queries share the cost of making a key. The absorbed form computes the right sides
on rows [c_s | k_rope_s], one for all heads. A pair costs (C+R) + C = 576 + 512 per
head, but no key or value is made for each head. That pays off where few queries share a
key: in decoding, and where each query lists its own keys.

RoPE on W_UK c_s would make the score q . Rot(t - s) W_UK c_s, whose rotation differs
for each s, so W_UK^T q could not be computed once per query: hence a separate k_rope
(DeepSeek-V2, arXiv 2405.04434; dims: GLM-5, arXiv 2602.15763).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

import pallas_kernels
from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import layers, rope
from glm5_jax.model import selection as selection_lib


class Latent(NamedTuple):
    """A token's share of the keys and values of all heads."""

    c: Float[Array, "B S C"]  # normalised
    k_rope: Float[Array, "B S R"]  # rotated, shared by the heads


class Softmax(NamedTuple):
    """Queries and keys of the expanded form, or of the absorbed one (row = C+R).

    A head's probabilities are exp(scale * q . k - lse).
    """

    q: Float[Array, "B T N H"] | Float[Array, "B T N row"]
    k: Float[Array, "B S N H"] | Float[Array, "B S row"]
    lse: Float[Array, "B N T"]  # log of the sum of the exponentials over the keys


def table(config: config_lib.ModelConfig) -> dict:
    """Declares the parameters of one attention."""
    d, n = config.hidden_size, config.num_attention_heads
    q, c = config.q_lora_rank, config.kv_lora_rank
    p, r, o = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        "q_a_proj": layers.Param((d, q), ("D", "Q"), num_in=1),
        "q_a_layernorm": layers.scale(q, "Q"),
        "q_b_proj": layers.Param((q, n, p + r), ("Q", "N", "H"), num_in=1),
        "kv_a_proj": layers.Param((d, c + r), ("D", "C+R"), num_in=1),
        "kv_a_layernorm": layers.scale(c, "C"),
        "k_b_proj": layers.Param((c, n, p), ("C", "N", "P")),
        "v_b_proj": layers.Param((c, n, o), ("C", "N", "O")),
        "o_proj": layers.Param((n, o, d), ("N", "O", "D"), num_in=2),
    }


def query_latent(
    params: layers.Params,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
) -> Float[Array, "B T Q"]:
    """Returns c_q, from which attention and indexer make their queries."""
    c_q = layers.linear(x, params["q_a_proj"])
    return layers.rms_norm(c_q, params["q_a_layernorm"], config.latent_norm_eps)


def queries(
    params: layers.Params,
    config: config_lib.ModelConfig,
    c_q: Float[Array, "B T Q"],
    context: context_lib.Context,
) -> tuple[Float[Array, "B T N P"], Float[Array, "B T N R"]]:
    """Returns the queries of every head: the part without RoPE, the rotated part."""
    nope = config.qk_nope_head_dim
    q_nope, q_rope = layers.linear_of_columns(
        c_q,
        params["q_b_proj"],  # columns of a head: P without RoPE, then R with it
        lambda w: w[..., :nope],
        lambda w: rope.halves(w[..., nope:]),
    )
    cos, sin = context.cos[:, :, None], context.sin[:, :, None]
    return q_nope, rope.rotate(q_rope, cos, sin)


def latent(
    params: layers.Params,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    context: context_lib.Context,
) -> Latent:
    """Returns the latent and the shared rotated key of every token."""
    rank = config.kv_lora_rank
    # The first C columns of kv_a_proj make c, the last R make k_rope.
    # GLM rotates pairs of dims (2i, 2i + 1), rope.rotate (i, i + R/2). `halves` orders
    # the columns so. Those of q are reordered alike, so q . k does not change.
    columns = (lambda w: w[..., :rank], lambda w: rope.halves(w[..., rank:]))
    c, k_rope = layers.linear_of_columns(x, params["kv_a_proj"], *columns)
    return Latent(
        c=layers.rms_norm(c, params["kv_a_layernorm"], config.latent_norm_eps),
        k_rope=rope.rotate(k_rope, context.cos, context.sin),
    )


def attend(
    params: layers.Params,
    config: config_lib.ModelConfig,
    c_q: Float[Array, "B T Q"],
    kv: Latent,
    context: context_lib.Context,
    selection: selection_lib.Selection,
) -> tuple[Float[Array, "B T D"], Softmax]:
    """Attends over whole documents, in the form that fits the selection.

    Query t sees keys lo[t] to hi[t] - 1, its document up to itself (lo and hi are in
    `context`). The selection keeps all of these (AllVisible), or some, in one of three
    encodings: a boolean (Mask, on a CPU) or a bit (Bits, on chips) for each pair of
    query and key, or K indices for each query (Listed, in long rows). Only Listed takes
    the absorbed form. The Softmax is for the loss of the indexer.
    """
    if isinstance(selection, selection_lib.Listed):
        return listed(params, config, c_q, kv, context, selection)
    return expanded(params, config, c_q, kv, context, selection)


def listed(
    params: layers.Params,
    config: config_lib.ModelConfig,
    c_q: Float[Array, "B T Q"],
    kv: Latent,
    context: context_lib.Context,
    selection: selection_lib.Listed,
) -> tuple[Float[Array, "B T D"], Softmax]:
    """Runs the absorbed form over listed keys; see `attend`."""
    q = latent_queries(params, config, c_q, context)
    rows = jnp.concatenate(kv, axis=-1)
    mixed, lse = pallas_kernels.sparse_mla(  # mixed: weighted sums of latents
        q,
        rows,
        selection.indices,
        scale=config.softmax_scale,
        value_dim=config.kv_lora_rank,
        indices_are_sorted=True,
    )
    return from_latent(params, mixed), Softmax(q, rows, lse)


def latent_queries(
    params: layers.Params,
    config: config_lib.ModelConfig,
    c_q: Float[Array, "B T Q"],
    context: context_lib.Context,
) -> Float[Array, "B T N row"]:
    """Returns [W_UK^T q_nope | q_rope], the queries of the absorbed form."""
    q_nope, q_rope = queries(params, config, c_q, context)
    q_latent = layers.einsum("btnp,cnp->btnc", q_nope, params["k_b_proj"])
    return jnp.concatenate([q_latent, q_rope], axis=-1)


def from_latent(
    params: layers.Params, mixed: Float[Array, "B T N C"]
) -> Float[Array, "B T D"]:
    """Applies W_UV to each head's weighted sum of latents, then projects the output."""
    return output(params, layers.einsum("btnc,cno->btno", mixed, params["v_b_proj"]))


def expanded(
    params: layers.Params,
    config: config_lib.ModelConfig,
    c_q: Float[Array, "B T Q"],
    kv: Latent,
    context: context_lib.Context,
    selection: selection_lib.Selection,
) -> tuple[Float[Array, "B T D"], Softmax]:
    """Runs the expanded form over the visible keys that the selection keeps."""
    q = jnp.concatenate(queries(params, config, c_q, context), axis=-1)
    k, v = keys_and_values(params, kv)  # [W_UK c | k_rope for each head], W_UV c
    mask, scale = selection_lib.dense_argument(selection), config.softmax_scale
    out, lse = pallas_kernels.dense_attention(
        q, k, v, context.lo, context.hi, mask, scale=scale
    )
    return output(params, out), Softmax(q, k, lse)


def keys_and_values(
    params: layers.Params, kv: Latent
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N O"]]:
    """Restores the keys and values of every head."""
    k_nope = layers.linear(kv.c, params["k_b_proj"])
    k_rope = jnp.broadcast_to(
        kv.k_rope[:, :, None], (*k_nope.shape[:3], kv.k_rope.shape[-1])
    )
    k = jnp.concatenate([k_nope, k_rope], axis=-1)
    return k, layers.linear(kv.c, params["v_b_proj"])


def all_heads(softmax: Softmax, is_latent: bool) -> Softmax:
    """Gathers the heads of all devices, without gradients."""
    q, k, lse = lax.stop_gradient(softmax)
    q, lse = (
        collectives.gather(x, collectives.SHARES, dim) for x, dim in ((q, 2), (lse, 1))
    )
    if not is_latent:
        k = collectives.gather(k, collectives.SHARES, 2)
    return Softmax(q, k, lse)


def output(
    params: layers.Params, out: Float[Array, "B T N O"]
) -> Float[Array, "B T D"]:
    """Projects and sums over heads, also over those of other devices."""
    y = layers.linear(out, params["o_proj"], num_in=2)
    return collectives.total(y, collectives.SHARES)
