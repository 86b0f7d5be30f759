"""Arrays inside `jax.shard_map` that differ between the devices of an axis.

With its default check_vma=True, shard_map tracks the axes along which each array
varies, and a loop's carry must keep its axes. So ops make all arguments vary along the
same axes, and start their sums with zeros that vary like the arguments.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def alike(tree: Any) -> Any:
    """Makes each array vary along every axis that one of the arrays varies along."""
    axes = _axes_of(tree)
    return jax.tree.map(lambda x: _along(axes, x) if _is_array(x) else x, tree)


def like(tree: Any, arrays: Any) -> Any:
    """Makes the results of a call that tells no axes vary along those of `arrays`."""
    axes = _axes_of(arrays)
    return jax.tree.map(lambda x: _along(axes, x), tree)


def zeros(shape: tuple[int, ...], dtype: Any, like: Any) -> Array:
    """Returns zeros that vary along the same axes as the arrays `like`."""
    return _along(_axes_of(like), jnp.zeros(shape, dtype))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def _along(axes: frozenset[str], x: Array) -> Array:
    missing = tuple(sorted(axes - _axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _axes_of(tree: Any) -> frozenset[str]:
    arrays = filter(_is_array, jax.tree.leaves(tree))
    return frozenset().union(*map(_axes, arrays))


def _axes(x: Array) -> frozenset[str]:
    """Returns the axes; None with check_vma=False or outside of a shard_map."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    return getattr(manual, "varying", getattr(kind, "vma", frozenset()))
