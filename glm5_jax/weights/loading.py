"""Loads a model from a run folder, a step folder, or a Hugging Face folder.

The content tells which one a path is: a run has a config.json with a "model" section
beside checkpoints/STEP/, a Hugging Face folder one with a "model_type" beside
*.safetensors. A name of the Hugging Face hub stands for the folder of its files.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from jax.sharding import Mesh

from glm5_jax import command_line, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.checkpoint import leaves, manager, step_folder
from glm5_jax.config import checks
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.model import transformer
from glm5_jax.processes import group
from glm5_jax.storage import copies
from glm5_jax.weights import (
    hub,
    huggingface,
    huggingface_config,
    index_share,
    stage_order,
    to_variants,
)

Path = str | pathlib.Path

# Fields of a model that change its logits but no parameter's shape.
MATHEMATICS = (
    *("rms_norm_eps", "latent_norm_eps", "rope_theta", "rope_scaling"),
    *("num_experts_per_tok", "routed_scaling_factor", "norm_topk_prob", "index_topk"),
    *("index_dtype", "layer_types", "variants"),
)
MAX_CONTEXT = 4096  # tokens read at once if no training run sets a length
DTYPES = ("float32", "bfloat16")


class Source(NamedTuple):
    """The places of a model's parts."""

    folder: pathlib.Path  # with config.json and, perhaps, tokenizer.json
    weights: pathlib.Path
    settings: dict[str, Any]  # content of config.json
    is_step: bool = False  # whether a step was named, not its run

    @property
    def is_huggingface(self) -> bool:
        """Returns whether the weights are safetensors, not Orbax."""
        return "model_type" in self.settings

    @property
    def is_quantized(self) -> bool:
        """Returns whether the weights are codes and scales."""
        return self.settings.get("quantization_config") is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Overridable:
    """The sections that the command line overrides when a model is read."""

    model: config_lib.ModelConfig = dataclasses.field(
        default_factory=config_lib.ModelConfig
    )
    mesh: config_lib.MeshConfig = dataclasses.field(
        default_factory=config_lib.MeshConfig
    )


def load_model(
    path: Path,
    overrides: Sequence[command_line.Override] = (),
    mesh: Mesh | None = None,
) -> tuple[config_lib.ModelConfig, dict, tokenizer_lib.Tokenizer | None]:
    """Returns config, parameters in their stored dtypes, and tokenizer or None.

    Layers to which overrides give other attention, or another layer's index, are
    converted (to_variants.py).

    Args:
      path: a run folder (its newest step), a step folder, a Hugging Face folder, or
        the name of a model of the hub.
      overrides: pairs such as ("model.index_topk", "32").
      mesh: devices that share the parameters; None puts them on the first device.

    Raises:
      InputError: nothing usable is there, or its parts do not fit together.
    """
    source = find(path)
    config = read_config(source, overrides)
    abstract, places = transformer.abstract_params(config), None
    if mesh is not None:
        checks.require(*config_lib.MeshConfig(**mesh.shape).model_rules(config))
        places = sharding.shardings(transformer.param_dims(config), mesh)
        abstract = jax.tree.map(lambda x, s: x.update(sharding=s), abstract, places)
    logging.info("Reading the parameters of %s ...", source.weights)
    tokenizer = tokenizer_of(source)
    if tokenizer is not None:
        tokenizer_lib.check_vocab(tokenizer, config.vocab_size)
    old = _converted_from(source, config, by_indexers=not source.is_huggingface)
    if old is not None:
        params = _read(source, old, to_variants.abstract_source(old, abstract))
        params = to_variants.load(params, old, config, abstract)
    elif source.is_huggingface:
        params = huggingface.load_params(
            source.weights, config, abstract, shardings=places
        )
    else:
        params = manager.restore_params(source.weights, abstract)
    return config, _finite(params, path), tokenizer


def load_params(
    path: Path, config: config_lib.ModelConfig, abstract_params: Any
) -> dict:
    """Returns parameters for a config that is already known, e.g. a training stage's.

    Layers whose type differs from the stored one are converted (to_variants.py).

    Args:
      path: as in `load_model`.
      config: of the model.
      abstract_params: shapes, types and shardings of the result.

    Raises:
      InputError: nothing usable is there, it has other shapes, or a layer lacks its
        indexer.
    """
    source = find(path)
    old = _converted_from(source, config)
    if old is None:
        return _finite(_read(source, config, abstract_params), path)
    params = _read(source, old, to_variants.abstract_source(old, abstract_params))
    return _finite(to_variants.load(params, old, config, abstract_params), path)


def _converted_from(
    source: Source, config: config_lib.ModelConfig, by_indexers: bool = False
) -> config_lib.ModelConfig | None:
    """Returns `to_variants.source_of` after a check that it can be converted."""
    old = to_variants.source_of(read_config(source), config, by_indexers)
    if old is not None:
        to_variants.require_convertible(old, config)
        index_share.require_indexers(old, config)
    return old


def _read(source: Source, config: config_lib.ModelConfig, abstract_params: Any) -> dict:
    if not source.is_huggingface:
        return manager.restore_params(source.weights, abstract_params)
    places = [leaf.sharding for leaf in jax.tree.leaves(abstract_params)]
    shardings = jax.tree.unflatten(jax.tree.structure(abstract_params), places)
    return huggingface.load_params(
        source.weights,
        config,
        abstract_params,
        config.param_dtype,
        None if None in places else shardings,
    )


def require_params(path: Path, config: config_lib.ModelConfig) -> None:
    """Checks that `load_params` would find every parameter, without reading any.

    Args:
      path: as in `load_model`.
      config: of the model.

    Raises:
      InputError: as in `load_params`.
    """
    source = find(path)
    config = _converted_from(source, config) or config
    abstract = transformer.abstract_params(config)
    if source.is_huggingface:
        huggingface.open_params(source.weights, config, abstract, config.param_dtype)
    else:
        manager.require_shapes(source.weights, abstract)


def require_same_mathematics(config: config_lib.TrainConfig) -> None:
    """Checks that init_from is what a run of this stage and model continues from.

    index_topk and index_dtype are compared only if both models select keys, and the
    sizes of attention variants only if both models have some.

    Raises:
      InputError: nothing usable is there, a field of MATHEMATICS differs that
        init_from_changes does not name, or the indexers are not ready for the stage.
    """
    if config.init_from is None:
        return
    ours, theirs = config.model, read_config(find(config.init_from))
    if "attention" not in config.init_from_changes:
        stage_order.require_ready_indexers(config, theirs.attention)
    is_dense = "dense" in (ours.attention, theirs.attention)
    is_free = {"index_topk", "index_dtype"} if is_dense else set()
    if not (ours.layer_types and theirs.layer_types):
        is_free |= {"variants"}
    differing = {
        name: (getattr(theirs, name), getattr(ours, name))
        for name in MATHEMATICS
        if name not in is_free | {*config.init_from_changes}
        and getattr(theirs, name) != getattr(ours, name)
    }
    if differing:
        lines = [
            f"\n  {k}: {there} in init_from, {here} in this run"
            for k, (there, here) in differing.items()
        ]
        raise config_lib.InputError(
            f"The model at init_from={config.init_from} computes differently:"
            + "".join(lines)
            + "\nSet --config.model.NAME to its values; or, to change them on purpose, "
            f'--config.init_from_changes="{tuple(differing)}".'
        )


def find(path: Path) -> Source:
    """Returns where the parts of the model at `path` are.

    Args:
      path: as in `load_model`.

    Raises:
      InputError: there is no folder, or it holds no model.
    """
    path = hub.folder(str(path)) if hub.is_name(path) else copies.local(path)
    path = pathlib.Path(step_folder.absolute(path))
    if not path.is_dir():
        raise config_lib.InputError(f"There is no folder {path}.")
    has_config = (path / "config.json").exists()  # which no step has
    is_step = path.parent.name == "checkpoints" and not has_config
    folder = path.parent.parent if is_step else path
    try:
        settings = huggingface_config.read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise config_lib.InputError(
            f"{path} holds no model: {folder / 'config.json'} cannot be read ({error})."
            f" Give a run folder, a step folder in its checkpoints/, or a Hugging Face "
            f"folder."
        ) from error
    if isinstance(settings, dict) and "model_type" in settings and not is_step:
        return Source(folder, folder, settings)
    if not (isinstance(settings, dict) and isinstance(settings.get("model"), dict)):
        raise config_lib.InputError(
            f"{folder / 'config.json'} describes no model: it has neither a section "
            f"'model' (as in a run) nor a model_type (as in a Hugging Face folder)."
        )
    return Source(folder, pathlib.Path(step_folder.find(path)), settings, is_step)


def read_config(
    source: Source, overrides: Sequence[command_line.Override] = ()
) -> config_lib.ModelConfig:
    """Returns the model's config, with --config.model.X applied.

    Raises:
      InputError: an override is of another section, or its value is invalid.
    """
    errors = [
        f"--config.{path} has no effect here; only --config.model.X=VALUE and, in "
        f"commands that run the model, --config.mesh.X=VALUE can be set."
        for path, _ in overrides
        if not path.startswith("model.")
    ]
    if errors:
        raise config_lib.InputError("\n".join(errors))
    model = source.settings.get("model")
    if source.is_huggingface:
        config = huggingface.read_config(source.folder)
        if config.has_mtp and not huggingface.stores_mtp(source.folder, config):
            logging.warning(
                "%s has no tensors of the MTP layer, which transformers leaves out; "
                "num_nextn_predict_layers is 0.",
                source.folder,
            )
            config = dataclasses.replace(config, num_nextn_predict_layers=0)
        stored = source.settings.get("dtype") or source.settings.get("torch_dtype")
        if stored in DTYPES:
            config = dataclasses.replace(config, dtype=stored, param_dtype=stored)
        model = command_line.to_json_dict(config)
    return command_line.resolve({"model": model}, overrides, _Overridable).model


def _finite(params: dict, path: Path) -> dict:
    """Returns the parameters after a check that they hold no NaN or infinity."""
    try:
        leaves.require_finite_params(params)
    except config_lib.InputError as error:
        raise config_lib.InputError(f"{path}: {error}") from error
    return params


def context_length(path: Path, config: config_lib.ModelConfig) -> int:
    """Returns how many tokens to read at once: the sequence length of training."""
    trained = find(path).settings.get("data", {}).get("sequence_length", MAX_CONTEXT)
    return min(trained, config.max_position_embeddings)


def tokenizer_of(source: Source) -> tokenizer_lib.Tokenizer | None:
    """Returns the tokenizer beside a model, or None.

    Raises:
      InputError: it cannot be used.
      DamagedError: it is not the tokenizer that the checkpoint was trained with.
    """
    path = source.folder / "tokenizer.json"
    if not path.exists():
        return None
    if not source.is_huggingface:
        wanted = manager.read_metadata(source.weights).get("tokenizer")
        if wanted and wanted != tokenizer_lib.digest_of(path):
            raise config_lib.DamagedError(
                f"{path} is not the file that {source.weights} was trained with (its "
                f"SHA-256 must be {wanted}). Copy the original file there, or, if "
                f"the run trained this tokenizer, start the run again to rewrite it."
            )
    return tokenizer_lib.load(path)


def require_tokenizer(
    config: config_lib.TrainConfig, tokenizer: tokenizer_lib.Tokenizer
) -> None:
    """Checks that a run uses the tokenizer of the weights in init_from.

    Raises:
      InputError: the tokenizer.json beside them is another one.
    """
    if config.init_from is None:
        return
    source = find(config.init_from)
    theirs, found = source.folder / "tokenizer.json", tokenizer_of(source)
    if found is not None and found.digest != tokenizer.digest:
        raise config_lib.InputError(
            f"data.tokenizer={config.data.tokenizer!r} is not the tokenizer of "
            f"init_from, {theirs}: the same ids stand for other texts. Set "
            f"data.tokenizer={str(theirs)!r}, or prepare data.source with it."
        )


def mesh_of(
    overrides: Sequence[command_line.Override],
) -> tuple[Mesh | None, list[command_line.Override]]:
    """Splits off the overrides of the mesh.

    Returns:
      The mesh that --config.mesh.X asks for, None without any, and other overrides.

    Raises:
      InputError: there is no such axis, or the devices do not fill the mesh.
    """
    config = mesh_config_of(overrides)
    if config is None:
        return None, [*overrides]
    others = [o for o in overrides if not o[0].startswith("mesh.")]
    return mesh_lib.make_mesh(config), others


def mesh_config_of(
    overrides: Sequence[command_line.Override],
) -> config_lib.MeshConfig | None:
    """Returns the mesh that --config.mesh.X asks for, None without any.

    Raises:
      InputError: there is no such axis.
    """
    ours = [o for o in overrides if o[0].partition(".")[0] == "mesh"]
    return command_line.resolve({}, ours, _Overridable).mesh if ours else None


def overrides_of(
    arguments: command_line.Arguments, alone: bool = True
) -> tuple[command_line.Override, ...]:
    """Returns the overrides of a command that takes its config from a checkpoint.

    Args:
      arguments: of the command line.
      alone: whether the command runs in one process only.

    Raises:
      InputError: a --config file was given, or this is one of several processes.
    """
    if alone:
        group.require_alone()
    if arguments.config is not None:
        raise config_lib.InputError(
            f"--config={arguments.config} is not used here: the config comes from the "
            f"model's folder. Single fields can be set: --config.model.X=VALUE."
        )
    return arguments.overrides
