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
from glm5_jax.weights import coded_leaves, huggingface, loading, to_variants

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
    is_coded = source.settings.get("quantization_config") is not None
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
    opened = {}
    dims = dict(_dims(config))
    for name, leaf in _open(source, config).items():
        opened[name] = (
            coded_leaves.opened(name, leaf)
            if is_coded
            else _rounded(name, leaf, dims[name], schemes.SCHEMES[scheme])
        )
    return config, _arrays(opened, config, mesh), tokenizer


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


def _rounded(
    path: leaves_lib.Path,
    leaf: leaves_lib.Leaf,
    dims: tuple[str, ...],
    scheme: schemes.Scheme,
) -> leaves_lib.Leaf | quantized.Quantized:
    """Reads and rounds one matrix after another; a parameter that stays is not read."""
    depth = schemes.stacks(dims)
    stack, shape = leaf.shape[:depth], leaf.shape[depth:]
    layout = schemes.layout_of(scheme, path, shape)
    if layout is None:
        return leaf
    made = jax.tree.map(
        lambda x: np.empty(x.shape, x.dtype), quantized.abstract(leaf.shape, layout)
    )
    for index in np.ndindex(*stack):
        window = (*(slice(i, i + 1) for i in index), *(slice(0, n) for n in shape))
        weights = leaf.read(window).reshape(shape)
        leaves_lib.require_finite(weights, ".".join(path))
        own = quantized.compiled_quantize(weights, layout)
        made.values[index], made.scales[index] = own.values, own.scales
    return made


def _arrays(
    opened: dict[leaves_lib.Path, Any],
    config: config_lib.ModelConfig,
    mesh: Mesh | None,
) -> dict:
    """Puts parameters on their devices, each process those of its own."""
    tree = leaves_lib.unflatten(opened)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = (
        jax.tree.map(lambda _: device, tree)
        if mesh is None
        else shards.shardings(tree, transformer.param_dims(config), mesh)
    )

    def one(path: tuple, x: Any, place: jax.sharding.Sharding) -> jax.Array:
        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            pairs = zip(index or (), x.shape, strict=True)
            window = tuple(slice(*cut.indices(n)[:2]) for cut, n in pairs)
            part = x[window] if isinstance(x, np.ndarray) else x.read(window)
            if jnp.issubdtype(part.dtype, jnp.floating):
                leaves_lib.require_finite(part, jax.tree_util.keystr(path))
            return part

        return jax.make_array_from_callback(x.shape, place, read)

    return jax.tree_util.tree_map_with_path(one, tree, places)
