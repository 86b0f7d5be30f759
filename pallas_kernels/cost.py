"""Cost estimates of kernels, into which no scheduler and no FLOP counter can see."""

from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl


def estimate(flops: int, *arrays: Any) -> pl.CostEstimate:
    """Returns the estimate of matrix products that read or write each array once."""
    moved = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    return pl.CostEstimate(flops=flops, bytes_accessed=int(moved), transcendentals=0)


def seen_pairs(num_queries: int, num_keys: int) -> int:
    """Returns the number of pairs of a query and a key that it sees: half of all."""
    return num_queries * (num_keys + 1) // 2


def rows(array: Any, num_rows: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of some rows of an array, to be counted as fetched."""
    return jax.ShapeDtypeStruct((num_rows, array.shape[-1]), array.dtype)
