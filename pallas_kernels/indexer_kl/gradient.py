"""The gradient of a loss that was known up to a factor while it was computed."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def times(factor: Float[Array, ""], gradient: Sequence[Array]) -> tuple[Array, ...]:
    """Scales a gradient in float32.

    A coefficient of the loss, 1/3 say, is 0.19 % off in bfloat16, and so would be every
    step of the indexer.
    """
    return tuple((g.astype(jnp.float32) * factor).astype(g.dtype) for g in gradient)
