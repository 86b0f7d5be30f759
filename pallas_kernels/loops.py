"""Loops that are none where there is one step.

XLA removes a loop of one step too, but only after JAX has traced its body several
times, once more for each derivative. Without it, the gradient of a small model takes a
third less time to trace and compile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def map(function: Callable, xs: Any) -> Any:
    """Computes `lax.map(function, xs)`; one step is called without a loop."""
    return scan(lambda _, x: (None, function(x)), None, xs)[1]


def scan(body: Callable, carry: Any, xs: Any) -> tuple[Any, Any]:
    """Computes `lax.scan(body, carry, xs)`; one step is called without a loop.

    Args:
      body: gets the carry and an entry of xs, and returns the next carry and an output.
      carry: any pytree; None carries nothing.
      xs: a pytree of arrays [steps, ...], of at least one array.

    Returns:
      The last carry, and the outputs, stacked [steps, ...].

    Raises:
      TypeError: the body returns a carry of another shape or dtype.
    """
    if len(jax.tree.leaves(xs)[0]) != 1:
        return lax.scan(body, carry, xs)
    after, out = body(carry, jax.tree.map(lambda x: lax.squeeze(x, (0,)), xs))
    if _form(carry) != _form(after):
        raise TypeError(f"The carry changes: {_form(carry)} becomes {_form(after)}.")
    return after, jax.tree.map(lambda x: lax.expand_dims(x, (0,)), out)


def _form(tree: Any) -> tuple:
    """Returns the structure of a pytree, and dtypes and shapes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [f"{jnp.result_type(x)}{[*jnp.shape(x)]}" for x in leaves]
