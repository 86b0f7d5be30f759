"""Positions and documents of the tokens, which every layer reads."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from glm5_jax import config as config_lib
from glm5_jax.model import rope


class Context(NamedTuple):
    """Positions as rotations, documents as bounds on the visible keys."""

    cos: Float[Array, "B T r"]
    sin: Float[Array, "B T r"]
    lo: Int[Array, "B T"]  # first token of the query's document
    hi: Int[Array, "B T"]  # one past the query itself; 0 for padding
    is_token: Bool[Array, "B T"]


def make_context(
    config: config_lib.ModelConfig,
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Context:
    """Context of rows of packed documents; segment 0 is padding."""
    cos, sin = rope.tables(
        positions, rope.frequencies(config), config.rope_scaling.rotation_factor
    )
    lo, hi = pallas_kernels.segment_bounds(segment_ids)
    return Context(cos=cos, sin=sin, lo=lo, hi=hi, is_token=segment_ids > 0)
