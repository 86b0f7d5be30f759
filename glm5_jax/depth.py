"""How a stack of layers is cut into groups that one scan each can run.

A layer's kind is two letters: its FFN (D dense, M experts) and its index (F owns an
indexer, S reuses the one before it). A group is a unit of kinds, repeated: GLM-5 is
DF x 3 and MF x 75; GLM-5.2 is DF x 3, (MS MS MS MF) x 18, MS x 3. Compile time grows
with the sum of the units, not with the depth.
"""

import dataclasses

from glm5_jax import config as config_lib

MAX_UNIT = 8


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers start .. start + len(unit) * repeats - 1."""

    start: int
    unit: tuple[str, ...]
    repeats: int

    @property
    def num_mixtures(self) -> int:
        """Layers with experts."""
        return self.repeats * sum(kind[0] == "M" for kind in self.unit)

    def layer(self, repeat: int, position: int) -> int:
        """Index of a layer in the whole stack."""
        return self.start + repeat * len(self.unit) + position


def layer_kinds(config: config_lib.ModelConfig) -> tuple[str, ...]:
    """Kind of every layer, e.g. ("DF", "MF", "MS")."""
    return tuple(
        ("D" if i < config.first_k_dense_replace else "M") + ("F" if is_full else "S")
        for i, is_full in enumerate(config.is_full_index_layer)
    )


def layer_groups(config: config_lib.ModelConfig) -> tuple[Group, ...]:
    """Cuts the stack greedily: at each layer, the unit that covers most layers."""
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
