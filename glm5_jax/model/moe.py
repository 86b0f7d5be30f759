"""Mixture of experts with loss-free balance (DeepSeek-V3, arXiv 2412.19437; GLM-4.5).

s = sigmoid(W_g x); the token's experts are the top-k of s + b; their gates are s,
normalised to sum to routed_scaling_factor. b is no gradient's parameter: it moves by
a fixed step against the load. Dropless: every chosen expert sees its token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import layers
from pallas_kernels import dispatch

FEW_TOKENS = 32  # for which reading an expert's weights costs more than using them


class Routing(NamedTuple):
    """What the router decided, and what its losses and its bias need."""

    experts: Int[Array, "B T K"]
    gates: Float[Array, "B T K"]
    load: Float[Array, " E"]  # tokens each expert got, padding left out
    balance: Float[Array, ""]  # sequence-level balance loss; 1 when even


def table(config: config_lib.ModelConfig) -> dict:
    """Parameters of one mixture."""
    e, d, f = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    params = {
        "gate": layers.Param((d, e), ("D", "E"), is_float32=True),
        "e_score_correction_bias": layers.bias(e, "E"),
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
    params: dict[str, Array],
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    is_token: Bool[Array, "B T"],
    experts: Int[Array, "B T K"] | None = None,
) -> Routing:
    """Chooses experts and gates, in float32: a rounded score is another expert.

    Where `experts` are given, only the gates are computed, from today's scores.
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
    """Sum of the chosen experts, weighted by their gates, and the shared expert."""
    with jax.named_scope("router"):
        routing = route(params, config, x, is_token, chosen)
    with jax.named_scope("experts"):
        rows = x.reshape(-1, x.shape[-1])
        chosen = routing.experts.reshape(len(rows), -1)
        gates = routing.gates.reshape(chosen.shape).astype(x.dtype)
        is_decoding = x.shape[1] == 1 and len(x) <= FEW_TOKENS
        is_in_turn = is_decoding and dispatch.platform() == "cpu"
        run = experts_in_turn if is_in_turn else experts_everywhere
        y = run(params["experts"], rows, chosen, gates).reshape(x.shape)
    if "shared_experts" in params:
        y = y + layers.swiglu(params["shared_experts"], x)
    return y, routing


def experts_everywhere(
    params: dict[str, Array],
    x: Float[Array, "t D"],
    chosen: Int[Array, "t K"],
    gates: Float[Array, "t K"],
) -> Float[Array, "t D"]:
    """`experts` of all devices: they see each other's tokens and sum what they made.

    Dropless whatever the load: each device has room for all tokens of its group.
    """
    axes = ("expert",)
    x, chosen, gates = (collectives.gather(y, axes, 0) for y in (x, chosen, gates))
    first = collectives.position(axes) * len(params["gate_proj"])
    y = experts(params, x, chosen - first, gates)
    return collectives.total(collectives.scatter_sum(y, axes, 0), collectives.SHARES)


def experts(
    params: dict[str, Array],
    x: Float[Array, "t D"],
    chosen: Int[Array, "t K"],
    gates: Float[Array, "t K"],
) -> Float[Array, "t D"]:
    """Sorts the t * K rows by expert, runs the grouped SwiGLU, and sums them back.

    Rows of experts that are not among the parameters' come last, and give zeros.
    """
    num_experts, per_token = params["gate_proj"].shape[0], chosen.shape[-1]
    is_here = (chosen >= 0) & (chosen < num_experts)
    chosen = jnp.where(is_here, chosen, num_experts).reshape(-1)
    order = _argsort(chosen, num_experts + 1)
    position = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    position = position.reshape(-1, per_token)
    sizes = jnp.bincount(chosen, length=num_experts + 1)[:num_experts]
    rows = _spread(x, order // per_token, position)
    gate = pallas_kernels.grouped_matmul(rows, params["gate_proj"], sizes)
    up = pallas_kernels.grouped_matmul(rows, params["up_proj"], sizes)
    hidden = jax.nn.silu(gate) * up * gates.reshape(-1)[order][:, None]
    out = pallas_kernels.grouped_matmul(hidden, params["down_proj"], sizes)
    return _gather_sum(out, order // per_token, position)


def experts_in_turn(
    params: dict[str, Array],
    x: Float[Array, "t D"],
    chosen: Int[Array, "t K"],
    gates: Float[Array, "t K"],
) -> Float[Array, "t D"]:
    """The same for a few tokens: each expert that any of them chose sees them all.

    What a step of decoding costs on a CPU is reading the weights, and overheads.
    """
    gates_Et = jnp.zeros((params["gate_proj"].shape[0], x.shape[0]), x.dtype)
    gates_Et = gates_Et.at[chosen, jnp.arange(x.shape[0])[:, None]].set(gates)

    def expert(e: Array, total: Array) -> Array:
        def add(total: Array) -> Array:
            own = jax.tree.map(lambda w: w[e], params)
            return total + gates_Et[e][:, None] * layers.swiglu(own, x)

        return lax.cond(jnp.any(chosen == e), add, lambda total: total, total)

    return lax.fori_loop(0, len(gates_Et), expert, jnp.zeros_like(x))


def updated_bias(
    bias: Float[Array, "*l E"], load: Float[Array, "*l E"], rate: float | Array
) -> Float[Array, "*l E"]:
    """Raises the bias of experts below the mean load, lowers it above."""
    error = jnp.mean(load, axis=-1, keepdims=True) - load
    return bias + rate * jnp.sign(error)


def _grid(experts: Int[Array, "B T K"]) -> tuple[Array, Array, Array]:
    """Indices (b, t, expert) that broadcast together."""
    b, t, _ = experts.shape
    return jnp.arange(b)[:, None, None], jnp.arange(t)[None, :, None], experts


def _argsort(chosen: Int[Array, " M"], num_experts: int) -> Int[Array, " M"]:
    """Stable order by expert; one sort of packed keys where they fit 31 bits."""
    size = chosen.size
    if size * num_experts >= 2**31:
        return jnp.argsort(chosen, stable=True)
    return jnp.sort(chosen * size + jnp.arange(size)) % size


# Spreading tokens over their rows and summing rows back are each other's transpose.
# Written so, both directions of both are gathers; autodiff would scatter.
@jax.custom_vjp
def _spread(
    x: Float[Array, "t D"], source: Int[Array, " M"], position: Int[Array, "t K"]
) -> Float[Array, "M D"]:
    """Row m is x[source[m]]; position[t] lists the rows of token t."""
    return x.at[source].get(mode="promise_in_bounds")


@jax.custom_vjp
def _gather_sum(
    rows: Float[Array, "M D"], source: Int[Array, " M"], position: Int[Array, "t K"]
) -> Float[Array, "t D"]:
    """Token t is the sum of rows[position[t]]."""
    return jnp.sum(rows.at[position].get(mode="promise_in_bounds"), axis=1)


_spread.defvjp(
    lambda x, *indices: (_spread(x, *indices), indices),
    lambda indices, g: (_gather_sum(g, *indices), None, None),
)
_gather_sum.defvjp(
    lambda rows, *indices: (_gather_sum(rows, *indices), indices),
    lambda indices, g: (_spread(g, *indices), None, None),
)
