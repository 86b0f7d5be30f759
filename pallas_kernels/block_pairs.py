"""Pairs of a query block and a key block: the grid of a TPU kernel.

A kernel visits a list of pairs instead of all pairs. It skips key blocks that no query
of a block sees: they are neither fetched nor a grid step. A pair is one int32 in scalar
memory, which holds the numbers of its blocks and flags.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NUMBER_BITS = 14  # width of a block's number
FIRST, LAST, WHOLE = (1 << n for n in range(2 * NUMBER_BITS, 2 * NUMBER_BITS + 3))
NUMBER = (1 << NUMBER_BITS) - 1
MAX_PAIRS = 220 * 1024  # per call, in all lists: scalar memory holds 1 MB


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Lists of pairs, one per sequence (or part of a sequence).

    Attributes:
      flat: [rows * size], the lists one after another, each sorted by its `major`
        block. Padding repeats a list's last pair and is negative.
      size: entries of a list.
      steps: pairs of the longest list, known at run time.
    """

    flat: Int[Array, " n"]
    size: int
    steps: Int[Array, ""]


def query_block(pair: Array) -> Array:
    """Returns the number of the pair's query block."""
    return (pair >> NUMBER_BITS) & NUMBER


def key_block(pair: Array) -> Array:
    """Returns the number of the pair's key block."""
    return pair & NUMBER


def is_pair(pair: Array) -> Array:
    """Tells a pair from the padding of its list."""
    return pair >= 0


def has(pair: Array, flag: int) -> Array:
    """Tests a flag: FIRST or LAST of a major block; WHOLE if all keys are visible."""
    return is_pair(pair) & ((pair & flag) != 0)


def size(num_blocks: tuple[int, int], rows: tuple[int, int], offset: int) -> int:
    """Returns the most pairs of a sequence, if query t sees no key after t + offset.

    Args:
      num_blocks: numbers of query blocks and of key blocks.
      rows: rows of a query block and of a key block.
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
    """Lists the pairs of blocks in which some query sees some key.

    Args:
      lo: first visible key, for a whole number of query blocks.
      hi: end of the visible keys.
      num_keys: a whole number of blocks.
      rows: rows of a query block and of a key block.
      offset: S - T before padding.
      major: "queries" or "keys". Every major block has a pair, to write its outputs.
      parts: lists per sequence, which take its query blocks in turn.
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
    """Sorts the numbers of pairs to the front, all others to the end."""
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
