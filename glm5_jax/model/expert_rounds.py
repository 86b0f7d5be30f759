"""Runs rows through experts in buffers of bounded size, in as many rounds as it takes.

Experts on other devices may all be unused, so a buffer for every possible row is as
many times larger than an even load as there are devices. Here a buffer has room for
some rows, and a round takes the next ones, sorted by expert, until none is left: one
round where the load is about even, more where it is not. No row is dropped.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax.model import expert_products

SPARE = 2  # times an even load: the room of a buffer
_TILE = 8  # rows of a buffer are a multiple of this


def room(num_rows: int, num_devices: int) -> int:
    """Returns the rows of a buffer.

    Args:
      num_rows: that a device may have at most.
      num_devices: devices that share them.
    """
    even = -(-num_rows // num_devices)
    return min(num_rows, -(-SPARE * even // _TILE) * _TILE)


def spare(transport: str, num_devices: int) -> int:
    """Returns how many times an even load the buffers of devices have room for."""
    return min(SPARE, num_devices) if transport == "rounds" else num_devices


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
    size: int,
    params: dict,
    x: Float[Array, "t D"],
    gates: Float[Array, " M"],
    source: Int[Array, " M"],
    sizes: Int[Array, " E"],
) -> Float[Array, "t D"]:
    """Sums, for each row of x, what its experts make of it.

    Args:
      size: rows of a buffer.
      params: of the experts.
      x: rows.
      gates: factors of the rows' copies, sorted by expert.
      source: row of x of each copy.
      sizes: copies of each expert; those after the last have none.
    """
    one = functools.partial(_round, size, source, sizes)

    def more(carry: tuple) -> tuple:
        n, y = carry
        return n + 1, y + one(n * size, params, x, gates)

    y = jnp.zeros(x.shape, jnp.float32)
    return _while_rows(size, sizes, more, 0, y).astype(x.dtype)


def _round(
    size: int,
    source: Int[Array, " M"],
    sizes: Int[Array, " E"],
    first: Int[Array, ""] | int,
    params: dict,
    x: Float[Array, "t D"],
    gates: Float[Array, " M"],
) -> Float[Array, "t D"]:
    """Returns the sums of the copies `first` to first + size - 1, in float32."""
    mine, factors = (
        lax.dynamic_slice_in_dim(jnp.pad(y, (0, size)), first, size)
        for y in (source, gates)
    )
    ends = jnp.cumsum(sizes)
    starts, ends = jnp.maximum(ends - sizes, first), jnp.minimum(ends, first + size)
    # In float32, as the gradient of a row is a sum as well.
    rows = x.astype(jnp.float32)[mine].astype(x.dtype)
    counts = jnp.maximum(ends - starts, 0)
    out = expert_products.swiglu(params, rows, counts, factors)
    return jnp.zeros(x.shape, jnp.float32).at[mine].add(out.astype(jnp.float32))


def _while_rows(
    size: int,
    sizes: Int[Array, " E"],
    more: Callable[[tuple], tuple],
    start: int,
    value: Any,
) -> Any:
    """Runs rounds, from number `start` on, until none of the rows is left."""
    total = jnp.sum(sizes)
    carry = jnp.int32(start), value
    return lax.while_loop(lambda carry: carry[0] * size < total, more, carry)[1]


def _forward(
    size: int, params: dict, x: Array, gates: Array, source: Array, sizes: Array
) -> tuple[Array, tuple]:
    """Runs the rounds, and keeps their input alone."""
    saved = params, x, gates, source, sizes
    return run(size, *saved), saved


def _backward(size: int, saved: tuple, g: Float[Array, "t D"]) -> tuple:
    """Recomputes every round for its gradients; the first one outside of the loop.

    So the sum of the weights' gradients is only added to if there is a second round.
    """
    *values, source, sizes = saved

    def gradients(first: Array | int) -> tuple:
        one = functools.partial(_round, size, source, sizes, first)
        return jax.vjp(one, *values)[1](g.astype(jnp.float32))

    def more(carry: tuple) -> tuple:
        n, sums = carry
        return n + 1, jax.tree.map(jnp.add, sums, gradients(n * size))

    sums = _while_rows(size, sizes, more, 1, gradients(0))
    return *sums, None, None


run.defvjp(_forward, _backward)
