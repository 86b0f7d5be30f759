"""The rows of a batch that a process makes, and the global arrays made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np


def of_this_process(batch: jax.ShapeDtypeStruct) -> list[int]:
    """Returns the rows of which the devices of this process hold a part, in order.

    With one process these are all rows.

    Args:
      batch: an array [B, T] with its sharding.
    """
    places: Any = batch.sharding.addressable_devices_indices_map(batch.shape)
    spans = {index[0].indices(batch.shape[0]) for index in places.values()}
    return sorted({row for span in spans for row in range(*span)})


def to_global_arrays(
    batch: Mapping[str, np.ndarray],
    sharding: jax.sharding.Sharding,
    rows: Sequence[int],
    num_rows: int,
) -> dict[str, jax.Array]:
    """Puts the rows of each process on its devices, as arrays of the whole batch.

    Args:
      batch: arrays [rows of this process, T].
      sharding: of the whole batch.
      rows: numbers of the rows of this process, see `of_this_process`.
      num_rows: of the whole batch.
    """
    first = {row: i for i, row in enumerate(rows)}

    def array(mine: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(num_rows)
            return mine[first[start] : first[start] + stop - start, index[1]]

        shape = num_rows, *mine.shape[1:]
        return jax.make_array_from_callback(shape, sharding, part)

    return {name: array(mine) for name, mine in batch.items()}
