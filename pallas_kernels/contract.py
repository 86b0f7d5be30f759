"""Checks of arguments that all implementations of an op share.

Shapes and types are known while a program is traced: wrong ones raise ValueError. The
values of bounds and lists are not known. Bounds are therefore clamped to the existing
keys, and list entries that name no key count as padding, so that no implementation
reads out of bounds. Kernels rely on the order of lists: each is put in order, unless
the caller says that it is.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import selection

CODES = ("float8_e4m3fn", "int8")
Arrays = Mapping[str, tuple[Array, str]]  # by name: the array, and its dims


def sizes(
    op: str,
    floats: Arrays,
    integers: Arrays,
    codes: Arrays | None = None,
    rows_of_bytes: Arrays | None = None,
) -> dict[str, int]:
    """Returns the size of each dim, as the first array with this dim has it.

    Args:
      op: name of the op, for messages.
      floats: arrays of floats.
      integers: arrays of signed integers.
      codes: arrays of 8 bits, which have scales.
      rows_of_bytes: arrays in which numbers of several types share rows.

    Raises:
      ValueError: if an array has a wrong rank, size or type.
    """
    known: dict[str, int] = {}
    kinds = {
        "floats": (floats, lambda x: jnp.issubdtype(x, jnp.floating)),
        "signed integers": (integers, lambda x: jnp.issubdtype(x, jnp.signedinteger)),
        "float8_e4m3fn or int8": (codes or {}, lambda x: x.name in CODES),
        "uint8": (rows_of_bytes or {}, lambda x: x == jnp.uint8),
    }
    for wanted, (arrays, is_kind) in kinds.items():
        for name, (x, dims) in arrays.items():
            _check_shape(op, name, x, dims.split(), known)
            if not is_kind(x.dtype):
                raise ValueError(f"{op}: {name} must be {wanted}, got {x.dtype}.")
    return known


def _check_shape(
    op: str, name: str, x: Array, dims: list[str], known: dict[str, int]
) -> None:
    """Checks an array's shape against `known`, and adds new dims to it."""
    fixed = {d: known[d] for d in dims if d in known}
    given = dict(zip(dims, x.shape, strict=False))
    if x.ndim != len(dims) or any(given[d] != size for d, size in fixed.items()):
        where = ", ".join(f"{d} = {size}" for d, size in fixed.items())
        raise ValueError(
            f"{op}: {name} must be [{', '.join(dims)}]"
            f"{' with ' + where if where else ''}, got {list(x.shape)}."
        )
    known.update(given)
    empty = [d for d in given if d in ("S", "s", "K", "D") and not given[d]]
    if empty:
        raise ValueError(f"{op}: {name} must have {empty[0]} >= 1, got {x.shape}.")


def bounded(
    op: str, floats: Arrays, lo: Int[Array, "B T"], hi: Int[Array, "B T"]
) -> tuple[dict[str, int], Int[Array, "B T"], Int[Array, "B T"]]:
    """Checks the arrays of an op over the visible keys of each query.

    The T queries are the last of the S tokens that have keys.

    Returns:
      Sizes of the dims, and int32 bounds with hi <= t + 1 + S - T.

    Raises:
      ValueError: if an array does not fit the others, or if there are more queries
        than keys.
    """
    known = sizes(op, floats, {"lo": (lo, "B T"), "hi": (hi, "B T")})
    num_queries, num_keys = known["T"], known["S"]
    if num_queries > num_keys:
        raise ValueError(
            f"{op}: queries are the last of the tokens that have keys, so that there "
            f"may be up to {num_keys}, got {num_queries}."
        )
    ends = jnp.arange(num_queries, dtype=jnp.int32)[None] + (num_keys - num_queries + 1)
    return known, *within(lo, hi, ends)


def listed(
    op: str, floats: Arrays, indices: Int[Array, "B T K"], is_sorted: bool
) -> tuple[dict[str, int], Int[Array, "B T K"]]:
    """Checks the arrays of an op over a list of keys for each query.

    Args:
      op: name of the op, for messages.
      floats: its other arrays.
      indices: the lists.
      is_sorted: the op needs no order, or the caller promises it.

    Returns:
      Sizes of the dims, and int32 lists, in which entries beyond the last key are -1.
      They ascend, with -1 at the end alone, unless `is_sorted`.

    Raises:
      ValueError: if an array does not fit the others.
    """
    known = sizes(op, floats, {"indices": (indices, "B T K")})
    indices = indices.astype(jnp.int32)
    if not is_sorted:
        return known, selection.as_sorted(indices, known["S"])
    return known, jnp.where(indices < known["S"], indices, -1)


def within(
    lo: Int[Array, "B T"], hi: Int[Array, "B T"], ends: Int[Array, "1 T"] | int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Clamps bounds to the keys 0 .. ends - 1, as int32."""
    lo, hi = lo.astype(jnp.int32), hi.astype(jnp.int32)
    return jnp.maximum(lo, 0), jnp.minimum(hi, ends)


def groups(group_sizes: Int[Array, " E"], num_rows: int) -> Int[Array, " E"]:
    """Cuts groups at the end of the rows; returns their int32 sizes."""
    ends = jnp.cumsum(jnp.maximum(group_sizes.astype(jnp.int32), 0))
    ends = jnp.minimum(ends, num_rows)
    return jnp.diff(ends, prepend=0)


def form(op: str, selected: Array | None, known: dict[str, int]) -> None:
    """Checks that a selection is a mask or bits of these queries and keys, or None.

    Raises:
      ValueError: if it is neither.
    """
    if selected is None:
        return
    batch, queries, keys = (known[d] for d in ("B", "T", "S"))
    shapes = {
        "bool": (batch, keys, queries),
        "uint32": (batch, queries, selection.num_words(keys)),
    }
    if selected.shape != shapes.get(selected.dtype.name):
        mask, bits = map(list, shapes.values())
        raise ValueError(
            f"{op}: selection must be a mask, bool {mask}, keys first, or bits, uint32 "
            f"{bits}, or None; got {selected.dtype} {list(selected.shape)}. Lists go "
            "to sparse_mla and sparse_indexer_kl_loss."
        )


def positive(op: str, **values: int) -> None:
    """Checks that counts are positive.

    Raises:
      ValueError: if one is below 1.
    """
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{op}: {name} must be at least 1, got {value}.")


def value_dim(op: str, size: int, width: int) -> None:
    """Checks that values are the first entries of rows, at least one.

    Raises:
      ValueError: if they are not.
    """
    if not 1 <= size <= width:
        raise ValueError(f"{op}: value_dim must be in 1 .. {width}, got {size}.")
