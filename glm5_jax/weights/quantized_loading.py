"""Loads a model with quantized leaves: as a folder stores them, or rounded on the way.

No matrix that is quantized is ever whole in memory as floats, but those of one layer
and expert at a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.checkpoint import manager, step_windows
from glm5_jax.config import checks
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf as quantized
from glm5_jax.quantization import schemes, shards
from glm5_jax.weights import (
    coded_leaves,
    huggingface,
    loading,
    rounding,
    to_variants,
)

STORED = config_lib.STORED


def load_model(
    path: loading.Path,
    overrides: Sequence[command_line.Override] = (),
    mesh: Mesh | None = None,
    scheme: str = STORED,
) -> tuple[config_lib.ModelConfig, dict, tokenizer_lib.Tokenizer | None]:
    """Returns config, parameters and tokenizer; see `loading.load_model`.

    Args:
      path: a run folder (its newest step), a step folder or a Hugging Face folder.
      overrides: pairs such as ("model.index_topk", "32").
      mesh: devices that share the parameters; None puts them on the first device.
      scheme: of quantization, or STORED.

    Raises:
      InputError: nothing usable is there, it has codes of another scheme, or layers
        would have to be converted to other attention.
    """
    source = loading.find(path)
    is_coded = source.is_quantized
    if scheme == STORED and not is_coded:
        return loading.load_model(path, overrides, mesh)
    if scheme != STORED and is_coded:
        raise config_lib.InputError(
            f"--quantize={scheme} is not for {path}, whose weights are quantized "
            f"already; leave it out."
        )
    config = loading.read_config(source, overrides)
    stored, keeps = loading.read_config(source), not source.is_huggingface
    if to_variants.source_of(stored, config, by_indexers=keeps) is not None:
        raise config_lib.InputError(
            "Overrides that give layers other attention or another index need weights "
            "that are not quantized; convert the model first."
        )
    tokenizer = loading.tokenizer_of(source)
    if tokenizer is not None:
        tokenizer_lib.check_vocab(tokenizer, config.vocab_size)
    if mesh is not None:
        checks.require(*config_lib.MeshConfig(**mesh.shape).model_rules(config))
    logging.info("Reading the parameters of %s ...", source.weights)
    opened, dims = _open(source, config), dict(_dims(config))
    tree: dict[leaves_lib.Path, Any] = {
        name: coded_leaves.opened(name, leaf)
        if is_coded
        else _to_round(name, leaf, dims[name], schemes.SCHEMES[scheme])
        for name, leaf in opened.items()
    }
    return config, _arrays(tree, opened, config, mesh), tokenizer


def _open(
    source: loading.Source, config: config_lib.ModelConfig
) -> Mapping[leaves_lib.Path, Any]:
    """Opens the parameters, without reading any."""
    abstract = transformer.abstract_params(config)
    if source.is_huggingface:
        return huggingface.open_params(source.weights, config, abstract)
    manager.verify_params(source.weights)
    return step_windows.open_params(source.weights, abstract)


def _dims(
    config: config_lib.ModelConfig,
) -> Iterator[tuple[leaves_lib.Path, tuple[str, ...]]]:
    """Yields path and dims of every parameter."""
    pairs = jax.tree_util.tree_leaves_with_path(
        transformer.param_dims(config), is_leaf=lambda node: isinstance(node, tuple)
    )
    for path, dims in pairs:
        yield tuple(key.key for key in path), dims


def _to_round(
    path: leaves_lib.Path,
    leaf: leaves_lib.Leaf,
    dims: tuple[str, ...],
    scheme: schemes.Scheme,
) -> leaves_lib.Leaf | quantized.Quantized:
    """Returns the shapes of a parameter's codes; the leaf itself if it stays."""
    layout = schemes.layout_of(scheme, path, leaf.shape[schemes.stacks(dims) :])
    return leaf if layout is None else quantized.abstract(leaf.shape, layout)


def _arrays(
    tree: dict[leaves_lib.Path, Any],
    opened: Mapping[leaves_lib.Path, leaves_lib.Leaf],
    config: config_lib.ModelConfig,
    mesh: Mesh | None,
) -> dict:
    """Puts parameters on their devices, each process those of its own.

    Args:
      tree: leaves to read, and shapes of those to round.
      opened: the leaves that are rounded.
      config: of the model.
      mesh: the devices; None for the first one.
    """
    nested = leaves_lib.unflatten(tree)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shardings = (
        jax.tree.map(lambda _: device, nested)
        if mesh is None
        else shards.shardings(nested, transformer.param_dims(config), mesh)
    )
    is_leaf = quantized.is_quantized
    places = jax.tree.leaves(shardings, is_leaf=is_leaf)
    pairs = jax.tree_util.tree_leaves_with_path(nested, is_leaf=is_leaf)
    made: dict[leaves_lib.Path, Any] = {}
    for (keys, x), place in zip(pairs, places, strict=True):
        path = tuple(key.key for key in keys)
        name = ".".join(path)
        if not is_leaf(x):
            made[path] = leaves_lib.place(_Checked(x, name), place)
        elif isinstance(x.values, jax.ShapeDtypeStruct):
            made[path] = rounding.place(name, opened[path], place)
        else:
            values = leaves_lib.place(_Checked(x.values, name), place.values)
            scales = leaves_lib.place(_Checked(x.scales, name), place.scales)
            made[path] = quantized.Quantized(values, scales, x.layout)
    return leaves_lib.unflatten(made)


class _Checked(leaves_lib.Leaf):
    """A parameter whose numbers must be finite."""

    def __init__(self, leaf: leaves_lib.Leaf, name: str) -> None:
        self._leaf, self._name = leaf, name
        self.shape, self.dtype = leaf.shape, leaf.dtype

    @property
    def cuts(self) -> tuple[int, ...]:
        return self._leaf.cuts

    def read(self, window: leaves_lib.Window) -> np.ndarray:
        values = self._leaf.read(window)
        if jnp.issubdtype(values.dtype, jnp.floating):
            leaves_lib.require_finite(values, self._name)
        return values
