"""Pairs of blocks of queries and keys that meet: the grid of a TPU's kernel.

A kernel visits a list of pairs instead of all of them: what no query of a block sees is
neither fetched nor counted as a step. A pair is one int32, read in scalar memory, with
the numbers of its blocks and what the kernel must know of it.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NUMBER_BITS = 14  # of a block's number
FIRST, LAST, WHOLE = (1 << n for n in range(2 * NUMBER_BITS, 2 * NUMBER_BITS + 3))
NUMBER = (1 << NUMBER_BITS) - 1
MAX_PAIRS = 220 * 1024  # of all lists of a call: scalar memory holds 1 MB


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Lists of pairs, one for each sequence (or part of one).

    Attributes:
      flat: [rows * size], the lists one after another. Sorted by the block that is
        `major`; the rest of a list repeats its last pair, and is negative.
      size: of a list.
      steps: of the longest list, known at run time.
    """

    flat: Int[Array, " n"]
    size: int
    steps: Int[Array, ""]


def query_block(pair: Array) -> Array:
    """Number of the pair's block of queries."""
    return (pair >> NUMBER_BITS) & NUMBER


def key_block(pair: Array) -> Array:
    """Number of the pair's block of keys."""
    return pair & NUMBER


def has(pair: Array, flag: int) -> Array:
    """FIRST or LAST of its major block; WHOLE: every query sees every key."""
    return (pair >= 0) & ((pair & flag) != 0)


def size(num_blocks: tuple[int, int], rows: tuple[int, int], offset: int) -> int:
    """Bounds the pairs of a sequence: no query t sees beyond key t + offset.

    Args:
      num_blocks: of queries and of keys.
      rows: of a block of queries and of keys.
      offset: S - T.
    """
    ends = ((i + 1) * rows[0] + offset for i in range(num_blocks[0]))
    return sum(min(max(-(-end // rows[1]), 1), num_blocks[1]) for end in ends)


def make(
    lo: Int[Array, "B T"],
    hi: Int[Array, "B T"],
    num_keys: int,
    rows: tuple[int, int],
    offset: int,
    *,
    major: str = "queries",
    parts: int = 1,
) -> Pairs:
    """Lists the pairs of blocks of which a query sees a key.

    Args:
      lo: first visible key, of a whole number of blocks of queries.
      hi: end of the visible keys.
      num_keys: a whole number of blocks.
      rows: of a block of queries and of keys.
      offset: S - T before padding.
      major: "queries" or "keys". Every major block has a pair, to write its outputs.
      parts: lists of a sequence, that share its blocks of queries in turn.
    """
    lo, hi = (x.reshape(x.shape[0], -1, rows[0]) for x in (lo, hi))
    start = jnp.arange(0, num_keys, rows[1], dtype=jnp.int32)[None, None]
    end = start + rows[1]
    low = jnp.min(jnp.where(lo < hi, lo, num_keys), axis=-1)[..., None]
    high = jnp.max(jnp.where(lo < hi, hi, 0), axis=-1)[..., None]
    meets = (low < end) & (start < high)
    is_whole = (jnp.max(lo, axis=-1)[..., None] <= start) & (
        end <= jnp.min(hi, axis=-1)[..., None]
    )
    if major == "queries":
        meets |= ~jnp.any(meets, axis=2, keepdims=True) & (start == 0)
    else:
        is_last = jnp.arange(lo.shape[1])[None, :, None] == lo.shape[1] - 1
        meets |= ~jnp.any(meets, axis=1, keepdims=True) & is_last
    limit = size((lo.shape[1], start.shape[2]), rows, offset)
    return _lists(meets, is_whole, limit, major, parts)


def _lists(
    meets: Bool[Array, "B query_blocks key_blocks"],
    is_whole: Bool[Array, "B query_blocks key_blocks"],
    limit: int,
    major: str,
    parts: int,
) -> Pairs:
    """Sorts the pairs' numbers: the others go to the end."""
    _, num_q, num_k = meets.shape
    i, j = jnp.arange(num_q)[None, :, None], jnp.arange(num_k)[None, None]
    code = (i << NUMBER_BITS) | j | jnp.where(is_whole, WHOLE, 0)
    is_mine = i % parts == jnp.arange(parts)[:, None, None]
    meets = (meets[:, None] & is_mine[None]).reshape(-1, num_q, num_k)
    code = jnp.repeat(code, parts, axis=0)
    if major == "keys":
        code, meets = code.swapaxes(1, 2), meets.swapaxes(1, 2)
    flat = meets.shape[1] * meets.shape[2]
    order = jnp.where(meets.reshape(-1, flat), jnp.arange(flat)[None], flat)
    limit = min(limit, flat)
    order = jnp.sort(order, axis=1)[:, :limit]
    count = jnp.sum(order < flat, axis=1, keepdims=True)
    last = jnp.take_along_axis(order, jnp.maximum(count - 1, 0), axis=1)
    is_pair = order < flat
    order = jnp.where(is_pair, order, last)
    pairs = jnp.take_along_axis(code.reshape(-1, flat), order % flat, axis=1)
    group = jnp.where(is_pair, order // meets.shape[2], -1)
    changes = group[:, 1:] != group[:, :-1]
    edge = jnp.ones_like(changes, shape=(len(group), 1))
    is_first = jnp.concatenate([edge, changes], axis=1)
    is_last = jnp.concatenate([changes, edge], axis=1)
    pairs |= jnp.where(is_first, FIRST, 0) | jnp.where(is_last, LAST, 0)
    pairs = jnp.where(is_pair, pairs, pairs | jnp.int32(-(1 << 31)))
    return Pairs(pairs.astype(jnp.int32).ravel(), limit, jnp.max(count))
