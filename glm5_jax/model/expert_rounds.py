"""Runs rows through experts in buffers of bounded size, in as many rounds as it takes.

Experts on other devices may all be unused, so a buffer for every possible row is as
many times larger than an even load as there are devices. Here a buffer has room for
some rows, and a round takes the next ones, sorted by expert, until none is left: one
round where the load is about even, more where it is not. No row is dropped.

Only the first round keeps results for the backward pass, as the policy of
rematerialisation decides. The others are loops, which an even load never enters.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax.model import expert_products

SPARE = 1.5  # times an even load: the room of a buffer for many rows
_DEVIATIONS = 4  # of the load of random choices, for which few rows have room as well
# The scope of the loops over later rounds. scale/hlo/parser.py and
# scale/compiled/flops.py read the name: such a loop runs at no even load.
OVERFLOW = "overflow"
_TILE = 8  # rows of a buffer are a multiple of this

# (number of the round, integers, arrays) -> its summand. Arrays have gradients.
Round = Callable[[Array | int, Any, Any], Array]


def room(num_rows: int, num_devices: int) -> int:
    """Returns the rows of a buffer.

    Args:
      num_rows: that a device may have at most.
      num_devices: devices that share them.
    """
    even = num_rows / num_devices
    rows = max(SPARE * even, even + _DEVIATIONS * even**0.5)
    return min(num_rows, math.ceil(rows / _TILE) * _TILE)


def spare(transport: str, num_devices: int) -> float | int:
    """Returns how many times an even load of many rows the buffers have room for."""
    return num_devices if transport == "gather" else min(SPARE, num_devices)


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
    one = functools.partial(_round, size)
    num_rounds = -(-jnp.sum(sizes) // size)
    y = summed(one, num_rounds, (source, sizes), (params, x, gates))
    return y.astype(x.dtype)


def _round(
    size: int,
    number: Array | int,
    integers: tuple[Int[Array, " M"], Int[Array, " E"]],
    arrays: tuple[dict, Float[Array, "t D"], Float[Array, " M"]],
) -> Float[Array, "t D"]:
    """Returns the sums of `size` copies from number * size on, in float32."""
    (source, sizes), (params, x, gates) = integers, arrays
    first = number * size
    mine, factors = (
        lax.dynamic_slice_in_dim(jnp.pad(y, (0, size)), first, size)
        for y in (source, gates)
    )
    counts = within(sizes, first, size)
    # In float32, as the gradient of a row is a sum as well.
    rows = x.astype(jnp.float32)[mine].astype(x.dtype)
    out = expert_products.swiglu(params, rows, counts, factors)
    return jnp.zeros(x.shape, jnp.float32).at[mine].add(out.astype(jnp.float32))


def within(
    sizes: Int[Array, " groups"], first: Array | int, size: int
) -> Int[Array, " groups"]:
    """Returns how many rows of each group are among first to first + size - 1."""
    ends = jnp.cumsum(sizes)
    starts, ends = jnp.maximum(ends - sizes, first), jnp.minimum(ends, first + size)
    return jnp.maximum(ends - starts, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed(one: Round, num_rounds: Int[Array, ""], integers: Any, arrays: Any) -> Array:
    """Sums one(n, integers, arrays) over rounds: the first, and those that follow.

    Args:
      one: computes a round; it closes over no array.
      num_rounds: in all; the first one runs even if it is 0.
      integers: what the rounds read and has no gradient.
      arrays: what the rounds read and has gradients, a tree.
    """
    add = lambda n, y: y + one(n, integers, arrays)
    return _later(num_rounds, add, one(0, integers, arrays))


def _later(num_rounds: Int[Array, ""], add: Callable, value: Any) -> Any:
    """Runs rounds 1 to num_rounds - 1: value = add(number, value)."""
    with jax.named_scope(OVERFLOW):
        return lax.while_loop(
            lambda carry: carry[0] < num_rounds,
            lambda carry: (carry[0] + 1, add(*carry)),
            (jnp.int32(1), value),
        )[1]


def _forward(
    one: Round, num_rounds: Int[Array, ""], integers: Any, arrays: Any
) -> tuple[Array, tuple]:
    """Keeps what the first round's gradient needs, and the input of the others."""
    first, pull = jax.vjp(functools.partial(one, 0, integers), arrays)
    add = lambda n, y: y + one(n, integers, arrays)
    y = _later(num_rounds, add, first)
    return y, (pull, num_rounds, integers, arrays)


def _backward(one: Round, saved: tuple, g: Array) -> tuple:
    """Adds to the first round's gradients those of the others, recomputed one by one.

    So the sum of the weights' gradients is only added to if there is a second round.
    """
    pull, num_rounds, integers, arrays = saved

    def add(n: Array, sums: Any) -> Any:
        again = jax.vjp(functools.partial(one, n, integers), arrays)[1](g)
        return jax.tree.map(jnp.add, sums, *again)

    (first,) = pull(g)
    return None, None, _later(num_rounds, add, first)


summed.defvjp(_forward, _backward)
