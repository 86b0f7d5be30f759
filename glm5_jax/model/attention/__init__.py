"""Attention: one file for each variant, behind the interface of protocol.py."""

from typing import Any

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model.attention import (
    dsa,
    gated_delta,
    grouped,
    latent_sliding,
    protocol,
    simple_gated_delta,
)


def make(config: config_lib.ModelConfig, kind: depth.Kind) -> protocol.Attention:
    """Returns the attention of a layer of this kind."""
    if kind.attention == "latent_sliding":
        return latent_sliding.SlidingLatentAttention(config)
    if kind.attention == "grouped":
        return grouped.GroupedAttention(config)
    if kind.attention == "grouped_sliding":
        return grouped.GroupedAttention(config, config.variants.sliding_window)
    if kind.attention == "gated_delta":
        return gated_delta.GatedDeltaNet(config)
    if kind.attention == "simple_gated_delta":
        return simple_gated_delta.SimpleGatedDeltaNet(config)
    return dsa.SparseLatentAttention(config, kind.owns_indexer)


def first_shared(
    config: config_lib.ModelConfig,
    batch: int,
    num_tokens: int,
    with_indexer_loss: bool,
) -> Any:
    """Returns the shared value for the first layer over whole rows of this shape.

    It starts a scan over layers, so it has the structure of the value that any layer
    hands to the next.
    """
    return dsa.first_shared(config, batch, num_tokens, with_indexer_loss)


def first_cached_shared(
    config: config_lib.ModelConfig, batch: int, num_tokens: int, capacity: int
) -> Any:
    """Returns the same for new tokens of sequences in a cache of this capacity."""
    return dsa.first_cached_shared(config, batch, num_tokens, capacity)
