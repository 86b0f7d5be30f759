"""Sends rows to the devices of their experts, and the results back.

A device's rows are sorted by expert, so those for each other device are one piece. A
device lines up the pieces that it gets in the order of their senders. Its buffer has
room for some of them; a round takes the next ones (expert_rounds.py).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from glm5_jax import collectives
from glm5_jax.model import expert_products, expert_rounds, expert_rows
from pallas_kernels import dispatch

_AXES = ("expert",)


class Moves(NamedTuple):
    """The pieces that devices send each other: [i, j] is that from i to j."""

    sizes: Int[Array, "n n"]  # rows
    starts: Int[Array, "n n"]  # first row in the sender's array
    lands: Int[Array, "n n"]  # first row in the receiver's array

    def reversed(self) -> "Moves":
        """Returns the moves that bring the pieces back."""
        return Moves(self.sizes.T, self.lands.T, self.starts.T)


def run(
    params: dict,
    x: Float[Array, "t D"],
    chosen: Int[Array, "t K"],
    gates: Float[Array, "t K"],
) -> Float[Array, "t D"]:
    """Sums each token's experts, as `experts.run`, over the devices of a group.

    Args:
      params: of the experts of this device.
      x: this device's tokens.
      chosen: experts of each token; the number of all experts means none.
      gates: weights of the chosen experts.
    """
    num_devices, num_here = collectives.size(_AXES), params["gate_proj"].shape[0]
    num_experts, per_token = num_devices * num_here, chosen.shape[-1]
    order, position = expert_rows.in_order(chosen.reshape(-1), num_experts + 1)
    # counts[i, e]: rows of device i for expert e. Rows without an expert come last,
    # stay on their device, and give zeros.
    counts = jnp.bincount(chosen.reshape(-1), length=num_experts + 1)[:num_experts]
    counts = collectives.gather(counts[None], _AXES, 0)
    most = num_devices * len(x) * min(per_token, num_here)
    room = min(most, expert_rounds.room(num_devices * order.size, num_devices))
    received = jnp.sum(counts.reshape(num_devices, num_devices, num_here), (0, 2))
    integers = order // per_token, position.reshape(chosen.shape), counts
    arrays = params, x, gates.reshape(-1)[order]
    num_rounds = -(-jnp.max(received) // room)
    one = functools.partial(_round, room)
    return expert_rounds.summed(one, num_rounds, integers, arrays).astype(x.dtype)


def _round(
    room: int,
    number: Array | int,
    integers: tuple[Array, Array, Array],
    arrays: tuple[dict, Array, Array],
) -> Float[Array, "t D"]:
    """Sends the rows that devices get as number * room to (number + 1) * room - 1."""
    (source, position, counts), (params, x, gates) = integers, arrays
    num_devices, num_here = len(counts), params["gate_proj"].shape[0]
    first = number * room
    moves = _moves(counts, first, room)
    rows = expert_rows.spread(x, source, position)
    rows = _exchange(rows, moves, room)
    me = collectives.index(_AXES)
    counts = lax.dynamic_slice_in_dim(counts, me * num_here, num_here, axis=1)
    # Received rows are sorted by sender, then by expert.
    counts = expert_rounds.within(counts.reshape(-1), first, room)
    slot = jnp.arange(room)
    piece = jnp.searchsorted(jnp.cumsum(counts), slot, side="right")
    expert = jnp.where(piece < counts.size, piece % num_here, num_here)
    # Gates come whole, as they are few: so no gradient needs the results once more.
    gates = collectives.gather(gates[None], _AXES, 0)
    sender = jnp.minimum(piece // num_here, num_devices - 1)
    row = moves.starts[sender, me] + slot - moves.lands[sender, me]
    factors = gates[sender, jnp.minimum(row, len(source) - 1)]
    back, there = expert_rows.in_order(expert, num_here + 1)
    grouped = expert_rows.spread(rows, back, there[:, None])
    sizes = jnp.sum(counts.reshape(num_devices, num_here), axis=0)
    out = expert_products.swiglu(params, grouped, sizes, factors[back])
    out = expert_rows.gather_sum(out, back, there[:, None])
    out = _exchange(out, moves.reversed(), len(source))
    return expert_rows.gather_sum(out, source, position).astype(jnp.float32)


def _moves(counts: Int[Array, "n experts"], first: Array | int, room: int) -> Moves:
    """Returns the part of each piece that its receiver takes in a round.

    Args:
      counts: rows of each device for each expert.
      first: number of rows that a receiver has taken before.
      room: number of rows that it takes.
    """
    num_devices = len(counts)
    sizes = jnp.sum(counts.reshape(num_devices, num_devices, -1), axis=2)
    ends = jnp.cumsum(sizes, axis=0)
    arrivals = ends - sizes  # among all that a receiver gets
    begin, end = (jnp.clip(y - first, 0, room) for y in (arrivals, ends))
    before = jnp.clip(first - arrivals, 0, sizes)  # rows of the piece in past rounds
    starts = jnp.cumsum(sizes, axis=1) - sizes + before
    return Moves(end - begin, starts, begin)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _exchange(
    rows: Float[Array, "M D"], moves: Moves, room: int
) -> Float[Array, "room D"]:
    """Sends pieces of rows to an array of `room` rows on each device; others are 0."""
    me = collectives.index(_AXES)
    sizes, starts, lands = moves
    empty = jnp.zeros((room, rows.shape[1]), rows.dtype)
    if dispatch.platform() != "cpu":
        offsets = starts[me], sizes[me], lands[me], sizes[:, me]
        return lax.ragged_all_to_all(rows, empty, *offsets, axis_name=_AXES[0])
    # XLA on CPU has no ragged exchange, so every device receives all rows.
    place = jnp.arange(len(rows))[None]
    pieces = rows[starts[me][:, None] + place]  # behind the end, JAX reads the last row
    pieces = lax.all_to_all(pieces, _AXES[0], 0, 0)
    size, land = sizes[:, me][:, None], lands[:, me][:, None]
    return empty.at[jnp.where(place < size, land + place, room)].set(
        pieces, mode="drop"
    )


_exchange.defvjp(
    lambda rows, moves, room: (_exchange(rows, moves, room), (moves, len(rows))),
    lambda room, saved, g: (_exchange(g, saved[0].reversed(), saved[1]), None),
)
