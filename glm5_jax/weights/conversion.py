"""Converts a model to a Hugging Face folder or a run folder, window by window."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.checkpoint import manager, step_folder, step_windows
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.model import transformer
from glm5_jax.weights import (
    companions,
    huggingface,
    huggingface_config,
    huggingface_export,
    index_share,
    loading,
    new_folder,
)

FORMATS = ("hf", "orbax")  # a Hugging Face folder, a run folder
CODED = (huggingface_export.FP8, *huggingface_export.COMPRESSED)
FLOATS = ("float32", "bfloat16")
DTYPES = (*FLOATS, *CODED)


def convert(
    source: loading.Path,
    target: loading.Path,
    to: str | None = None,
    overrides: Sequence[command_line.Override] = (),
    dtype: str | None = None,
) -> str:
    """Writes the model at `source` to the new folder `target`.

    Args:
      source: a run folder (its newest step), a step folder or a Hugging Face folder.
      target: a folder that does not exist.
      to: one of FORMATS; None for the format that the source is not in.
      overrides: of the config, see `loading.load_model`.
      dtype: one of DTYPES; None keeps those of the source, and makes FP8 the config's
        param_dtype where a run folder is written.

    Returns:
      The format written.

    Raises:
      InputError: `source` holds no model, `target` exists, or the target's format has
        no such dtype or no such model.
      DamagedError: a file of the step fails its checksum.
    """
    target = pathlib.Path(step_folder.absolute(target))
    if target.exists():
        raise config_lib.InputError(f"{target} exists; choose another target.")
    found = loading.find(source)
    to = to or FORMATS[found.is_huggingface]
    if to not in FORMATS:
        raise config_lib.InputError(f"The format must be hf or orbax, got {to!r}.")
    dtypes = DTYPES if to == "hf" else FLOATS
    if dtype not in (None, *dtypes):
        raise config_lib.InputError(
            f"The format {to} supports {', '.join(dtypes)}, got --dtype={dtype}."
        )
    config = loading.read_config(found, overrides)
    if to == "hf":
        huggingface_config.require_writable(config)
    if (tokenizer := loading.tokenizer_of(found)) is not None:
        tokenizer_lib.check_vocab(tokenizer, config.vocab_size)
    is_fp8 = found.is_huggingface and huggingface.is_fp8(found.settings)
    if to == "hf" and dtype is None and is_fp8:
        dtype = huggingface_export.FP8
    original = companions.original_config(found)
    leaves = _open(found, config, dtype)
    _require_float(leaves, found)
    with new_folder.new_folder(target) as partial:
        if to == "hf":
            huggingface_export.write_leaves(
                leaves, config, partial, dtype, extra_config=original
            )
            companions.copy_texts(found, partial)
        else:
            _write_run(partial, found, config, leaves)
    return to


def _require_float(
    leaves: dict[leaves_lib.Path, leaves_lib.Leaf], found: loading.Source
) -> None:
    """Checks that the weights have a dtype that a model may have.

    Raises:
      InputError: they have not.
    """
    kind = leaves["lm_head",].dtype.name
    if kind not in FLOATS:
        raise config_lib.InputError(
            f"{found.folder} has weights of {kind}, of which no model is written; give "
            f"--dtype={' or --dtype='.join(FLOATS)}. Other formats are made of those."
        )


def _open(
    found: loading.Source, config: config_lib.ModelConfig, dtype: str | None
) -> dict[leaves_lib.Path, leaves_lib.Leaf]:
    """Opens the parameters in `dtype`; in float32 where FP8 codes are made of them."""
    kind = dtype
    if dtype in CODED:
        kind = "float32" if dtype == huggingface_export.FP8 else None
    if found.is_huggingface:
        abstract = transformer.abstract_params(config)
        return dict(huggingface.open_params(found.weights, config, abstract, kind))
    manager.verify_params(found.weights)
    before = dataclasses.replace(
        config, index_topk_pattern=loading.read_config(found).index_topk_pattern
    )
    abstract = transformer.abstract_params(before)
    stored = step_windows.open_params(found.weights, abstract)
    if config.is_full_index_layer != before.is_full_index_layer:
        stored = index_share.share_leaves(dict(stored), before, config)
    kinds = {path: huggingface.cast(path, kind) for path in stored}
    return {
        path: leaves_lib.CastLeaf(leaf, kinds[path] or leaf.dtype)
        for path, leaf in stored.items()
    }


def _write_run(
    folder: pathlib.Path,
    found: loading.Source,
    config: config_lib.ModelConfig,
    leaves: dict[leaves_lib.Path, leaves_lib.Leaf],
) -> None:
    """Writes a run folder with one step, numbered as in the source or 0."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    new_folder.require_space(folder, size)
    name = found.weights.name  # any name, where a step folder was copied
    step = int(name) if not found.is_huggingface and name.isdecimal() else 0
    params = leaves_lib.unflatten(leaves)
    metadata, texts = {}, found.folder / companions.TOKENIZER
    if texts.exists():
        metadata["tokenizer"] = tokenizer_lib.digest_of(texts)
    step_windows.save_params(folder / "checkpoints" / str(step), params, metadata)
    kind: Any = str(leaves["lm_head",].dtype)
    config = dataclasses.replace(config, param_dtype=kind)
    settings = {"model": command_line.to_json_dict(config)}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    companions.into_run(found, folder)
