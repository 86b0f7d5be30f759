"""Routes tokens to experts, on one device or across devices.

On a mesh with an expert axis each device has some of the experts. Tokens reach them in
one of three ways, with the same numbers. "gather": each device receives all tokens of
its group, and the devices sum their results. "rounds": the same, with smaller buffers
that may be filled more than once. "exchange": a token's rows go only to the devices of
its experts, and back (expert_exchange.py), with the same small buffers. None drops a
token, whatever the load.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.model import (
    expert_exchange,
    expert_products,
    expert_rounds,
    expert_rows,
    layers,
)
from pallas_kernels import dispatch

FEW_TOKENS = 32  # up to here, reading an expert's weights costs more than using them
# Up to here, the new tokens of a sequence are drafts to verify: decoding, whose weights
# would be read once for each chunk of the tokens.
_FEW_NEW = 8
_AXES = ("expert",)


def run(
    params: layers.Params,
    config: config_lib.ModelConfig,
    x: Float[Array, "B T D"],
    chosen: Int[Array, "B T K"],
    gates: Float[Array, "B T K"],
) -> Float[Array, "B T D"]:
    """Sums each token's experts, weighted by their gates.

    Args:
      params: of the experts; on a mesh those on this device.
      config: of the model.
      x: hidden states.
      chosen: experts of each token, all different; n_routed_experts means none.
      gates: weights of the chosen experts.
    """
    rows = x.reshape(-1, x.shape[-1])
    chosen, gates = (y.reshape(len(rows), -1) for y in (chosen, gates))
    is_decoding = x.shape[1] == 1 and len(x) <= FEW_TOKENS
    is_decoding &= not config.batch_invariant  # decoding sums in another order
    is_here = collectives.size((*_AXES, *collectives.SHARES)) == 1
    if is_decoding and is_here and dispatch.platform() == "cpu":
        return in_turn(params, rows, chosen, gates).reshape(x.shape)
    way = grouped
    if collectives.size(_AXES) > 1:
        way = _WAYS[config.expert_transport]
    if x.shape[1] > _FEW_NEW:  # prompts of any length may not divide
        cut = _side_by_side if config.remat_policy == "experts" else _in_chunks
        way = cut(way, math.gcd(config.expert_chunks, len(rows)))
    y = way(params, rows, chosen, gates)
    return collectives.total(y, collectives.SHARES).reshape(x.shape)


def are_whole() -> bool:
    """Returns whether a device stores its experts' matrices whole."""
    cut = collectives.fetched_axes(("E", "D", "F"))
    return collectives.size([axis for axes in cut for axis in axes]) == 1


def _in_chunks(way: Callable[..., Array], num_chunks: int) -> Callable[..., Array]:
    """Runs the experts on one part of the tokens after another, with smaller buffers.

    The backward pass recomputes each part and adds its gradients to the weights'.
    """
    if num_chunks == 1:
        return way

    def run(params: layers.Params, *tokens: Array) -> Array:
        parts = [y.reshape(num_chunks, -1, *y.shape[1:]) for y in tokens]
        part = jax.checkpoint(lambda xs: way(params, *xs))
        return lax.map(part, parts).reshape(tokens[0].shape)

    return run


def _side_by_side(way: Callable[..., Array], num_chunks: int) -> Callable[..., Array]:
    """Runs the experts on each part of the tokens, in any order and none twice.

    Rows of one part may travel while those of another are multiplied. The buffers of
    all parts together are as large as those of one whole.
    """

    def run(params: layers.Params, *tokens: Array) -> Array:
        parts = zip(*(jnp.split(y, num_chunks) for y in tokens), strict=True)
        return jnp.concatenate([way(params, *part) for part in parts])

    return way if num_chunks == 1 else run


def by_gather(
    params: layers.Params,
    x: Float[Array, "t D"],
    chosen: Int[Array, "t K"],
    gates: Float[Array, "t K"],
    is_bounded: bool = False,
) -> Float[Array, "t D"]:
    """Gathers all tokens of the group, and sums the devices' results.

    Args:
      params: of the experts of this device.
      x: this device's tokens.
      chosen: experts of each token.
      gates: weights of the chosen experts.
      is_bounded: whether the rows of experts go through a buffer in rounds.
    """
    x, chosen, gates = (collectives.gather(y, _AXES, 0) for y in (x, chosen, gates))
    first = collectives.index(_AXES) * params["gate_proj"].shape[0]
    num_devices = collectives.size(_AXES) if is_bounded else 1
    y = grouped(params, x, chosen - first, gates, num_devices)
    return collectives.scatter_sum(y, _AXES, 0)


by_rounds = functools.partial(by_gather, is_bounded=True)
_WAYS: dict[str, Callable[..., Array]] = {
    "gather": by_gather,
    "rounds": by_rounds,
    "exchange": expert_exchange.run,
}


def grouped(
    params: layers.Params,
    x: Float[Array, "t D"],
    chosen: Int[Array, "t K"],
    gates: Float[Array, "t K"],
    num_devices: int = 1,
) -> Float[Array, "t D"]:
    """Sorts the t * K rows by expert, runs the grouped SwiGLU, and sums them back.

    Rows of experts on other devices come last and give zeros.

    Args:
      params: of the experts of this device.
      x: tokens.
      chosen: experts of each token; others than this device's are of other devices.
      gates: weights of the chosen experts.
      num_devices: devices that share the rows, for buffers that have no room for all;
        1 for buffers that have.
    """
    num_experts, per_token = params["gate_proj"].shape[0], chosen.shape[-1]
    is_here = (chosen >= 0) & (chosen < num_experts)
    chosen = jnp.where(is_here, chosen, num_experts).reshape(-1)
    order, position = expert_rows.in_order(chosen, num_experts + 1)
    position = position.reshape(-1, per_token)
    sizes = jnp.bincount(chosen, length=num_experts + 1)[:num_experts]
    source, factors = order // per_token, gates.reshape(-1)[order]
    if num_devices > 1:
        size = expert_rounds.room(order.size, num_devices)
        return expert_rounds.run(size, params, x, factors, source, sizes)
    rows = expert_rows.spread(x, source, position)
    out = expert_products.swiglu(params, rows, sizes, factors)
    return expert_rows.gather_sum(out, source, position)


def in_turn(
    params: layers.Params,
    x: Float[Array, "t D"],
    chosen: Int[Array, "t K"],
    gates: Float[Array, "t K"],
) -> Float[Array, "t D"]:
    """Runs every chosen expert on all of a few tokens, one expert after another.

    On a CPU, a decoding step spends its time on reading weights and on overheads.
    """
    gates_Et = jnp.zeros((params["gate_proj"].shape[0], x.shape[0]), x.dtype)
    gates_Et = gates_Et.at[chosen, jnp.arange(x.shape[0])[:, None]].set(gates)

    def expert(e: Array, total: Array) -> Array:
        def add(total: Array) -> Array:
            own = jax.tree.map(lambda w: w[e], params)
            return total + gates_Et[e][:, None] * layers.swiglu(own, x)

        return lax.cond(jnp.any(chosen == e), add, lambda total: total, total)

    return lax.fori_loop(0, len(gates_Et), expert, jnp.zeros_like(x))
