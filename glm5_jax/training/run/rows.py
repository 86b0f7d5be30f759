"""Which rows of a batch a process makes, and how they become one global array."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np


def own(batch: jax.ShapeDtypeStruct) -> list[int]:
    """Rows of an array [B, T] that this process's devices hold some part of, in order.

    All of them where there is one process.
    """
    places: Any = batch.sharding.addressable_devices_indices_map(batch.shape)
    spans = {index[0].indices(batch.shape[0]) for index in places.values()}
    return sorted({row for span in spans for row in range(*span)})


def place(
    batch: Mapping[str, np.ndarray],
    where: jax.sharding.Sharding,
    rows: Sequence[int],
    num_rows: int,
) -> dict[str, jax.Array]:
    """Puts a process's rows on its devices; all processes' make one batch.

    Args:
      batch: arrays [rows of this process, T].
      where: of the whole batch.
      rows: which they are; what `own` says.
      num_rows: of the whole batch.
    """
    first = {row: i for i, row in enumerate(rows)}

    def array(mine: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(num_rows)
            return mine[first[start] : first[start] + stop - start, index[1]]

        shape = num_rows, *mine.shape[1:]
        return jax.make_array_from_callback(shape, where, part)

    return {name: array(mine) for name, mine in batch.items()}
