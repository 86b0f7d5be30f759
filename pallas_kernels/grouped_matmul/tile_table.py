"""The tiles of rows that cover groups of any sizes: as many as the shapes say."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def make(group_sizes: Array, num_rows: int, size: int) -> Int[Array, "3 tiles"]:
    """Returns group, first row and end of each tile of `size` rows.

    ceil(M / size) + E tiles are enough for any group sizes. Rows after the last group
    are of group E, as are tiles that hold no row.
    """
    sizes = group_sizes.astype(jnp.int32)
    sizes = jnp.concatenate([sizes, num_rows - jnp.sum(sizes, keepdims=True)])
    ends, tiles = jnp.cumsum(sizes), (sizes + size - 1) // size
    tile_ends = jnp.cumsum(tiles)
    count = -(-num_rows // size) + group_sizes.shape[0]
    i = jnp.arange(count, dtype=jnp.int32)
    group = jnp.sum(tile_ends[None] <= i[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, group_sizes.shape[0])
    start = (ends - sizes)[group] + (i - (tile_ends - tiles)[group]) * size
    return jnp.stack([group, start, ends[group]])
