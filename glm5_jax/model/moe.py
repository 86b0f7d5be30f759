"""Mixture of experts, balanced by a bias (DeepSeek-V3, arXiv 2412.19437; GLM-4.5).

s = sigmoid(W_g x); the token's experts are the top-k of s + b; their gates are s,
normalised to sum to routed_scaling_factor. Every chosen expert sees its token
(dropless). b has no gradient: after a step, b_e <- b_e + rate sign(mean load - load_e),
where the load is the number of tokens of the batch that go to the expert. A small loss
balances each sequence besides: sum_e f_e P_e, where f_e is the load of expert e over
the mean load, both in the sequence, and P_e the mean over tokens of s_e / sum(s).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import experts as experts_lib
from glm5_jax.model import layers


class Routing(NamedTuple):
    """The router's decisions, and statistics for its loss and its bias."""

    experts: Int[Array, "B T K"]
    gates: Float[Array, "B T K"]
    load: Float[Array, " E"]  # tokens of each expert; padding has none
    balance: Float[Array, ""]  # sequence-level balance loss; 1 when even


def table(config: config_lib.ModelConfig) -> dict:
    """Declares the parameters of one layer's experts and router."""
    e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    params = {
        "gate": layers.Param((d, e), ("D", "E"), is_float32=True, num_in=1),
        # The bias decides between close experts; its steps are too small for bfloat16.
        "e_score_correction_bias": dataclasses.replace(
            layers.bias(e, "E"), is_kept_float32=True
        ),
        "experts": {
            "gate_proj": layers.Param((e, d, f), ("E", "D", "F")),
            "up_proj": layers.Param((e, d, f), ("E", "D", "F")),
            "down_proj": layers.Param((e, f, d), ("E", "F", "D")),
        },
    }
    if config.n_shared_experts:
        width = f * config.n_shared_experts
        params["shared_experts"] = layers.swiglu_table(d, width)
    return params


def route(
    params: layers.Params,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    is_token: Bool[Array, "B T"],
    experts: Int[Array, "B T K"] | None = None,
) -> Routing:
    """Chooses experts and gates, in float32: rounded scores would choose differently.

    With `experts` given, only the gates are computed, from the current scores.
    """
    exact = lax.Precision.HIGHEST
    logits = layers.linear(x.astype(jnp.float32), params["gate"], precision=exact)
    scores = jax.nn.sigmoid(logits)
    if experts is None:
        bias = params["e_score_correction_bias"][None, None]
        biased = lax.stop_gradient(scores + bias)
        _, experts = lax.top_k(biased, config.num_experts_per_tok)
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    num_experts = scores.shape[-1]
    is_chosen = jnp.zeros(scores.shape, bool).at[_grid(experts)].set(True)
    normal = scores / jnp.sum(scores, axis=-1, keepdims=True)
    sums = (
        jnp.sum(is_chosen & is_token[..., None], axis=1, dtype=jnp.float32),
        jnp.sum(jnp.where(is_token[..., None], normal, 0), axis=1),
        jnp.sum(is_token, axis=1, dtype=jnp.float32)[:, None],
    )
    load_BE, total_BE, tokens = collectives.total(sums, collectives.CONTEXT)
    tokens = jnp.maximum(tokens, 1)
    share_BE = load_BE * num_experts / (config.num_experts_per_tok * tokens)
    balance = jnp.mean(jnp.sum(share_BE * total_BE / tokens, axis=-1))
    return Routing(
        experts=experts,
        gates=gates * config.routed_scaling_factor,
        load=collectives.total(jnp.sum(load_BE, axis=0), collectives.ROWS),
        balance=collectives.mean(balance, collectives.ROWS),
    )


def moe(
    params: dict,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    is_token: Bool[Array, "B T"],
    chosen: Int[Array, "B T K"] | None = None,
) -> tuple[Float[Array, "B T D"], Routing]:
    """Sums the chosen experts, weighted by their gates, and the shared expert.

    Padding goes through the shared expert only.
    """
    with jax.named_scope("router"):
        routing = route(params, config, x, is_token, chosen)
    with jax.named_scope("experts"):
        gates = routing.gates.astype(x.dtype)
        # Padding has no expert: all padding would choose the same ones.
        none = config.n_routed_experts
        chosen = jnp.where(is_token[..., None], routing.experts, none)
        y = experts_lib.run(params["experts"], config, x, chosen, gates)
    if "shared_experts" in params:
        y = y + layers.swiglu(params["shared_experts"], x)
    return y, routing


def updated_bias(
    bias: Float[Array, "*n E"], load: Float[Array, "*n E"], rate: float | Array
) -> Float[Array, "*n E"]:
    """Raises the bias of experts below the mean load, lowers it above."""
    error = jnp.mean(load, axis=-1, keepdims=True) - load
    return bias + rate * jnp.sign(error)


def _grid(experts: Int[Array, "B T K"]) -> tuple[Array, Array, Array]:
    """Returns indices (b, t, expert) that broadcast together."""
    b, t, _ = experts.shape
    return jnp.arange(b)[:, None, None], jnp.arange(t)[None, :, None], experts
