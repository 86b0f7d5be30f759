"""Converts a model to one whose layers share indexers (IndexShare, arXiv 2603.12201).

A layer with the letter S in model.index_topk_pattern attends to the keys that the
nearest earlier layer with F selects, and has no indexer. All other parameters stay.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.config import checks
from glm5_jax.model import block as block_lib

Tree = dict[str, Any]


class LayersLeaf(leaves_lib.Leaf):
    """A stack of layers of other parameters, read from them."""

    def __init__(self, layers: Sequence[tuple[leaves_lib.Leaf, int]]) -> None:
        """Takes, for each layer, a stacked parameter and the place in its stack."""
        self._layers, first = layers, layers[0][0]
        self.shape, self.dtype = (len(layers), *first.shape[1:]), first.dtype

    def read(self, window: leaves_lib.Window) -> np.ndarray:
        """Reads a window, layer by layer."""
        return np.concatenate(
            [
                leaf.read((slice(place, place + 1), *window[1:]))
                for leaf, place in self._layers[window[0]]
            ]
        )


def share(
    params: Tree, config: config_lib.ModelConfig, pattern: str
) -> tuple[Tree, config_lib.ModelConfig]:
    """Returns parameters and config of the model with this index_topk_pattern.

    Args:
      params: of the model.
      config: of the model.
      pattern: a letter a layer, F or S; F only where the model has an indexer.

    Raises:
      InputError: the pattern is none of this model, or lacks an indexer.
    """
    new = dataclasses.replace(config, index_topk_pattern=pattern)
    return regrouped(params, config, new, lambda x, i: x[i], jnp.stack), new


def share_leaves(
    leaves: dict[leaves_lib.Path, leaves_lib.Leaf],
    config: config_lib.ModelConfig,
    new: config_lib.ModelConfig,
) -> dict[leaves_lib.Path, leaves_lib.Leaf]:
    """Returns the parameters of `new`, to be read in windows from those of `config`."""
    tree = leaves_lib.unflatten(leaves)
    tree = regrouped(tree, config, new, lambda leaf, place: (leaf, place), LayersLeaf)
    return leaves_lib.flatten(tree)[0]


def regrouped(
    params: Tree,
    config: config_lib.ModelConfig,
    new: config_lib.ModelConfig,
    take: Callable[[Any, int], Any],
    stack: Callable[[Sequence[Any]], Any],
) -> Tree:
    """Returns a tree of parameters in the groups of layers of another pattern.

    Args:
      params: of `config`.
      config: of the model.
      new: the config with another index_topk_pattern.
      take: returns a layer of a stacked parameter.
      stack: joins layers to a stacked parameter.

    Raises:
      InputError: a layer of `new` needs an indexer that `config` lacks.
    """
    require_indexers(config, new)
    layers = by_layer(params, config, take)
    tree = {k: v for k, v in params.items() if not k.startswith("layers_")}
    for g, group in enumerate(depth.layer_groups(new)):
        blocks = {}
        for p, kind in enumerate(group.unit):
            names = block_lib.make(new, kind).table()
            found = [
                {name: layers[group.layer(repeat, p)][name] for name in names}
                for repeat in range(group.repeats)
            ]
            blocks[f"block_{p}"] = jax.tree.map(
                lambda *xs: stack(xs), *found, is_leaf=lambda x: isinstance(x, tuple)
            )
        tree[f"layers_{g}"] = blocks
    return tree


def by_layer(
    params: Tree, config: config_lib.ModelConfig, take: Callable[[Any, int], Any]
) -> list[Tree]:
    """Returns the parameters of each layer."""
    found: list[Tree] = []
    for g, group in enumerate(depth.layer_groups(config)):
        for repeat in range(group.repeats):
            for p in range(len(group.unit)):
                block = params[f"layers_{g}"][f"block_{p}"]
                found.append(jax.tree.map(lambda x, r=repeat: take(x, r), block))
    return found


def require_indexers(
    config: config_lib.ModelConfig, new: config_lib.ModelConfig
) -> None:
    """Checks that each layer that owns an indexer in `new` owns one in `config`.

    Raises:
      InputError: one does not.
    """
    lacking = [
        layer
        for layer, (has, needs) in enumerate(
            zip(config.is_full_index_layer, new.is_full_index_layer, strict=True)
        )
        if needs and not has
    ]
    checks.require(
        (
            not lacking,
            f"index_topk_pattern has F at layers {lacking}, where the model has no "
            f"indexer; set S there.",
        )
    )
