"""Cost estimates of kernels, which schedulers and FLOP counters cannot inspect."""

from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl


def estimate(flops: int, *arrays: Any) -> pl.CostEstimate:
    """Returns the cost of matrix products that read or write each array once."""
    moved = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return pl.CostEstimate(flops=flops, bytes_accessed=int(moved), transcendentals=0)


def seen_pairs(num_queries: int, num_keys: int) -> int:
    """Returns the number of visible pairs of query and key: half of all pairs."""
    return num_queries * (num_keys + 1) // 2


def rows(array: Any, num_rows: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array's fetched rows, to count their bytes."""
    return jax.ShapeDtypeStruct((num_rows, array.shape[-1]), array.dtype)
