"""Loops over tiles of queries, each with the keys that causality lets it see.

Arrays of queries have T on axis -2, arrays of keys S on axis -2. The queries are the
last T of S tokens: no query t sees a key beyond t + S - T.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, loops

ROWS = 64  # queries of a tile: its scores [N, S, ROWS] stay in the L2 cache
GATHERING_ROWS = 16  # queries of a tile that gathers K rows for each
TIERS = 4  # key ranges compiled separately, each of two or more tiles


def over_sequences(function: Callable, *args: Any) -> Any:
    """Maps over the leading (batch) axis: a loop on CPU, vmap on accelerators."""
    if dispatch.platform() == "cpu":
        return loops.map(lambda xs: function(*xs), args)
    return jax.vmap(function)(*args)


def over_tiles(
    body: Callable,
    carry: Any,
    queries: Any,
    keys: Any,
    mask: jax.Array | None = None,
    out_axis: int = -2,
    key_axes: Any = -2,
) -> tuple[Any, Any]:
    """Runs `carry, out = body(carry, query_tile, seen_keys, mask)` for one sequence.

    Args:
      body: gets queries [..., ROWS, x], keys [..., S', x], S' <= S, and the mask
        [S', ROWS]; its outputs have the tile's rows on `out_axis`.
      carry: state handed from tile to tile.
      queries: pytree of arrays [..., T, x].
      keys: pytree of arrays [..., S, x].
      mask: [S, T], or None.
      out_axis: -2 or -1.
      key_axes: -2, or a pytree of -2 and -1: the axis of S in each array of keys.

    Returns:
      The last carry, and the outputs joined on `out_axis`.
    """
    num_queries = jax.tree.leaves(queries)[0].shape[-2]
    key_axes = jax.tree.broadcast(key_axes, keys)
    num_keys = jax.tree.leaves(keys)[0].shape[jax.tree.leaves(key_axes)[0]]
    rows = min(ROWS, num_queries)
    num_tiles = -(-num_queries // rows)
    padding = num_tiles * rows - num_queries
    queries = jax.tree.map(lambda x: _pad(x, padding, -2), queries)
    mask = None if mask is None else _pad(mask, padding, -1)
    per_tier = max(-(-num_tiles // TIERS), 2)
    outs = []
    for first in range(0, num_tiles, per_tier):
        last = min(first + per_tier, num_tiles)
        end = min(last * rows + num_keys - num_queries, num_keys)
        seen = jax.tree.map(functools.partial(_first, end), keys, key_axes)
        rows_seen = None if mask is None else mask[:end]

        def step(
            carry: Any, i: jax.Array, seen: Any = seen, mask: Any = rows_seen
        ) -> tuple[Any, Any]:
            def cut(x: jax.Array, axis: int) -> jax.Array:
                if x.shape[axis] == rows:
                    return x
                return lax.dynamic_slice_in_dim(x, i * rows, rows, x.ndim + axis)

            tile = jax.tree.map(lambda x: cut(x, -2), queries)
            return body(carry, tile, seen, None if mask is None else cut(mask, -1))

        carry, out = loops.scan(step, carry, jnp.arange(first, last))
        outs.append(jax.tree.map(lambda x: _join(x, out_axis), out))
    joined = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=out_axis), *outs)
    return carry, jax.tree.map(
        lambda x: lax.slice_in_dim(x, 0, num_queries, axis=x.ndim + out_axis), joined
    )


def over_queries(
    body: Callable, carry: Any, *queries: jax.Array, rows: int = GATHERING_ROWS
) -> tuple[Any, Any]:
    """Scans `carry, outs = body(carry, *tiles)` over tiles of `rows` queries.

    Use it for tiles that see all keys or gather their own. Queries and outputs are
    [B, T, ...]; padding is -1 in integers and 0 in floats.
    """
    num_queries = queries[0].shape[1]
    rows = min(rows, num_queries)

    def cut(x: jax.Array) -> jax.Array:
        fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        widths = [(0, 0), (0, -num_queries % rows), *[(0, 0)] * (x.ndim - 2)]
        x = jnp.pad(x, widths, constant_values=fill)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, rows, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_queries]

    xs = tuple(map(cut, queries))
    carry, outs = loops.scan(lambda carry, xs: body(carry, *xs), carry, xs)
    return carry, jax.tree.map(join, outs)


def _first(size: int, x: jax.Array, axis: int) -> jax.Array:
    """Returns the first entries of an axis."""
    return lax.slice_in_dim(x, 0, size, axis=x.ndim + axis)


def _pad(x: jax.Array, size: int, axis: int) -> jax.Array:
    """Appends zeros on an axis: bounds lo = hi = 0 see no key."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size)
    return jnp.pad(x, widths) if size else x


def _join(tiles: jax.Array, axis: int) -> jax.Array:
    """Puts the tiles' leading axis before `axis` and merges the two."""
    x = jnp.moveaxis(tiles, 0, axis - 1)
    axis %= x.ndim
    return x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :])
