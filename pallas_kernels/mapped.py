"""Kernels under `jax.vmap`, which has no rule for many of them.

Neither Triton's kernels nor those that fetch rows by themselves can be given another
axis by JAX. They run once for each entry of a mapped axis. Arguments that are folded
into the ops' own axis of sequences run at once, and are better where that is possible.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl


def one_by_one(kernel: Callable) -> Callable:
    """Returns the call of a kernel, for arrays of which `jax.vmap` may map any."""
    return jax.custom_batching.sequential_vmap(kernel)


def pallas_call(kernel: Callable, **options: Any) -> Callable:
    """Returns the call of a Pallas kernel that runs once for each mapped entry."""
    return one_by_one(pl.pallas_call(kernel, **options))
