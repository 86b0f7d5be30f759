"""The keys that a query may see, and the three forms of a selection among them.

- mask: Bool[B, S, T], keys first. The form of plain XLA on CPU.
- bits: UInt32[B, T, W], one bit a key: key s is bit (s % 4096) // 128 of word
  (s // 4096) * 128 + s % 128, so that a vector of 128 lanes holds 32 runs of 128 keys.
- list: Int32[B, T, K], indices strictly ascending, padded with -1 at the end. Kernels
  rely on this: a key listed twice, or a -1 before the end, gives wrong results on some.
  They cannot raise an error, because values are unknown while a program is traced:
  `as_sorted` puts lists in order, and `check_lists` checks known values.
"""

from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels import chips, dispatch

LANES = 128
# From so many keys on, gathering listed rows should beat a dense product in
# training, by chip: between times of two lengths on the h200, computed for the others
# (docs/design/0004-one-seam-for-kernels.md).
LISTS_FROM = {"v5p": 36864, "v6e": 131072, "tpu7x": 131072, "h200": 8192}
UNKNOWN_LISTS_FROM = 32768  # for other chips
RUN = 32 * LANES  # keys of 128 words


def segment_bounds(
    segment_ids: Int[Array, "B T"],
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the first visible key and the end, for causal packed documents.

    Args:
      segment_ids: document of each token, contiguous; 0 is padding, which sees nothing.
    """
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    before = jnp.roll(segment_ids, 1, axis=1)  # a row's first token starts at 0 anyway
    starts = jnp.where(segment_ids != before, index, 0)
    return lax.cummax(starts, axis=1), jnp.where(segment_ids > 0, index + 1, 0)


def visible(lo: Int[Array, "*n"], hi: Int[Array, "*n"], num_keys: int) -> Array:
    """Marks the keys in lo .. hi - 1: [*n, S]."""
    s = jnp.arange(num_keys).reshape((1,) * lo.ndim + (-1,))
    return (s >= lo[..., None]) & (s < hi[..., None])


def as_mask(
    selected: Bool[Array, "B S T"]
    | UInt32[Array, "B T W"]
    | Int[Array, "B T K"]
    | None,
    num_keys: int,
) -> Bool[Array, "B S T"] | None:
    """Returns the mask of a selection in any form."""
    if selected is None or selected.dtype == bool:
        return selected
    if is_list(selected):
        return to_mask(selected, num_keys)
    return unpack(selected, num_keys)


def as_rows(
    lo: Int[Array, "B T"], hi: Int[Array, "B T"], selected: Array | None, num_keys: int
) -> Bool[Array, "B T S"]:
    """Marks the keys that count for each query: the selected or all visible ones."""
    mask = as_mask(selected, num_keys)
    return visible(lo, hi, num_keys) if mask is None else mask.swapaxes(1, 2)


def form(num_keys: int) -> str:
    """Returns the form that attention reads on the chip that a program is traced for.

    Plain XLA on CPU reads masks. In short contexts kernels read bits in a dense
    product, which costs less than gathering the listed rows.
    """
    if dispatch.platform() == "cpu":
        return "mask"
    return "list" if num_keys >= lists_from(dispatch.chip()) else "bits"


def lists_from(chip: chips.Chip | None) -> int:
    """Returns the number of keys from which attention on a chip gathers lists."""
    name = "" if chip is None else chip.name
    return LISTS_FROM.get(name, UNKNOWN_LISTS_FROM)


def empty(batch: int, num_queries: int, num_keys: int, topk: int) -> jax.Array:
    """Returns zeros with a selection's shape and type on this chip."""
    return {
        "mask": lambda: jnp.zeros((batch, num_keys, num_queries), bool),
        "bits": lambda: jnp.zeros((batch, num_queries, num_words(num_keys)), "uint32"),
        "list": lambda: jnp.zeros((batch, num_queries, topk), "int32"),
    }[form(num_keys)]()


def is_list(selected: jax.Array | None) -> TypeGuard[jax.Array]:
    """Returns whether a selection is a list of indices."""
    return selected is not None and jnp.issubdtype(selected.dtype, jnp.signedinteger)


def num_words(num_keys: int) -> int:
    """Returns W, the words per row of bits."""
    return -(-num_keys // RUN) * LANES


def pack(mask: Bool[Array, "B S T"]) -> UInt32[Array, "B T W"]:
    """Packs a mask into bits."""
    batch, num_keys, num_queries = mask.shape
    padding = -num_keys % RUN
    rows = jnp.pad(mask, ((0, 0), (0, padding), (0, 0))).swapaxes(1, 2)
    runs = rows.reshape(batch, num_queries, -1, 32, LANES).astype(jnp.uint32)
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None, None, :, None]
    words = jnp.sum(runs << shifts, axis=3, dtype=jnp.uint32)
    return words.reshape(batch, num_queries, -1)


def unpack(bits: UInt32[Array, "B T W"], num_keys: int) -> Bool[Array, "B S T"]:
    """Unpacks bits into a mask."""
    batch, num_queries, _ = bits.shape
    words = bits.reshape(batch, num_queries, -1, 1, LANES)
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None, None, :, None]
    rows = ((words >> shifts) & 1).astype(bool).reshape(batch, num_queries, -1)
    return rows[..., :num_keys].swapaxes(1, 2)


def check_lists(
    indices: Int[Array, "B T K"] | Int[np.ndarray, "B T K"], num_keys: int
) -> None:
    """Checks lists whose values are known, such as those of a file.

    Raises:
      ValueError: if a list is not strictly ascending with -1 only at the end, or has
        an index of no key.
    """
    rows = np.asarray(indices)
    is_key = rows >= 0
    follows = is_key[..., 1:] & (rows[..., 1:] <= rows[..., :-1])
    faults = {
        "names a key twice or falls": follows & is_key[..., :-1],
        "has -1 before its end": is_key[..., 1:] & ~is_key[..., :-1],
        f"names a key beyond the {num_keys} keys": rows >= num_keys,
        "has an entry below -1": rows < -1,
    }
    for fault, where in faults.items():
        if where.any():
            row = tuple(map(int, np.argwhere(where)[0][:-1]))
            raise ValueError(f"the list of query {row} {fault}: {rows[row]}.")


def as_sorted(indices: Int[Array, "B T K"], num_keys: int) -> Int[Array, "B T K"]:
    """Lists each key once and in order, with -1 only at the end, by sorting twice."""
    is_key = (indices >= 0) & (indices < num_keys)
    rows = jnp.sort(jnp.where(is_key, indices, num_keys), axis=-1)
    is_again = jnp.diff(rows, axis=-1, prepend=-1) == 0
    rows = jnp.sort(jnp.where(is_again, num_keys, rows), axis=-1)
    return jnp.where(rows < num_keys, rows, -1)


def to_list(mask: Bool[Array, "B S T"], topk: int) -> Int[Array, "B T K"]:
    """Lists the keys of a mask that marks at most `topk` keys per query."""
    num_keys = mask.shape[1]
    s = jnp.arange(num_keys, dtype=jnp.int32)[None, :, None]
    rows = jnp.sort(jnp.where(mask, s, num_keys).swapaxes(1, 2), axis=-1)[..., :topk]
    room = ((0, 0), (0, 0), (0, max(topk - num_keys, 0)))
    rows = jnp.pad(rows, room, constant_values=num_keys)
    return jnp.where(rows < num_keys, rows, -1)


def to_mask(indices: Int[Array, "B T K"], num_keys: int) -> Bool[Array, "B S T"]:
    """Turns a list into a mask."""

    def row(indices: Int[Array, " K"]) -> Bool[Array, " S"]:
        place = jnp.where(indices < 0, num_keys, indices)
        return jnp.zeros(num_keys, bool).at[place].set(True, mode="drop")

    return jax.vmap(jax.vmap(row))(indices).swapaxes(1, 2)
