"""The kinds of layers, and the groups of layers that one scan each runs.

A group is a unit of layers, repeated. GLM-5 has two groups: 3 dense layers, then 75
layers with experts, each with its own indexer. GLM-5.2 repeats a unit of four layers 18
times; the first three of the unit share the index of an earlier layer. Compile time
grows with the sum of the units, not with the depth.
"""

import dataclasses
from typing import Literal, NamedTuple

from glm5_jax import config as config_lib

MAX_UNIT = 8


class Kind(NamedTuple):
    """Tells layers with different parameters or mathematics apart."""

    feed_forward: Literal["dense", "experts"]
    index: Literal["own", "shared", "none"]  # whose index its attention reads
    attention: str = "latent"  # a name of ModelConfig.layer_types

    @property
    def has_experts(self) -> bool:
        """Returns whether the feed-forward layer is a mixture of experts."""
        return self.feed_forward == "experts"

    @property
    def owns_indexer(self) -> bool:
        """Returns whether the layer has an indexer, and so an index, of its own."""
        return self.index == "own"


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers start to start + len(unit) * repeats - 1."""

    start: int
    unit: tuple[Kind, ...]
    repeats: int

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.repeats * sum(kind.has_experts for kind in self.unit)

    def layer(self, repeat: int, position: int) -> int:
        """Returns the number of a layer in the whole stack."""
        return self.start + repeat * len(self.unit) + position


def layer_kinds(config: config_lib.ModelConfig) -> tuple[Kind, ...]:
    """Returns the kind of every layer."""
    pairs = zip(config.layer_attention, config.is_full_index_layer, strict=True)
    return tuple(
        _kind(layer < config.first_k_dense_replace, owns_indexer, attention)
        for layer, (attention, owns_indexer) in enumerate(pairs)
    )


def mtp_kind(config: config_lib.ModelConfig) -> Kind:
    """Returns the kind of the multi-token-prediction module's layer.

    Its attention is of the last layer's type; where that has an index, it is its own.
    """
    return _kind(False, True, config.layer_attention[-1])


def _kind(is_dense: bool, owns_indexer: bool, attention: str) -> Kind:
    index = "own" if owns_indexer else "shared"
    feed_forward = "dense" if is_dense else "experts"
    return Kind(feed_forward, index if attention == "latent" else "none", attention)


def layer_groups(config: config_lib.ModelConfig) -> tuple[Group, ...]:
    """Cuts the stack greedily: each group takes the unit that covers most layers."""
    kinds = layer_kinds(config)
    groups, start = [], 0
    while start < len(kinds):
        options = []
        for size in range(1, MAX_UNIT + 1):
            unit, repeats = kinds[start : start + size], 1
            while kinds[start + repeats * size :][:size] == unit:
                repeats += 1
            if size == 1 or repeats > 1:
                options.append((repeats * size, -size, Group(start, unit, repeats)))
        covered, _, group = max(options, key=lambda option: option[:2])
        groups.append(group)
        start += covered
    return tuple(groups)
