"""The window of a sliding attention: the last keys before a query, itself included."""

import jax.numpy as jnp

from glm5_jax.model import context as context_lib


def narrowed(context: context_lib.Context, size: int) -> context_lib.Context:
    """Returns the context in which a query sees at most its last `size` keys."""
    return context._replace(lo=jnp.maximum(context.lo, context.hi - size))


def mean_keys(length: int, size: int) -> float:
    """Returns the keys in the window, the mean over a document's queries."""
    full = min(length, size)  # queries 1 to `full` see all keys before them
    return (full * (full + 1) / 2 + (length - full) * size) / length
