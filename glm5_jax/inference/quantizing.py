"""Implements the command quantize."""

import collections
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging

from glm5_jax import command_line, files
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import scoring
from glm5_jax.model import transformer
from glm5_jax.quantization import equivalents, schemes
from glm5_jax.weights import (
    companions,
    conversion,
    huggingface_export,
    loading,
    new_folder,
    quantized_loading,
    safetensors_file,
)

MANIFEST = "quantization.json"
# Fields that change logits and that the config.json of the new folder has no key for.
_UNWRITTEN = ("attention", "index_dtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to make of a model.

    Attributes:
      scheme: of quantization.
      data: path of a text that is scored before and after; None scores none.
      calibration: rewriting of the weights before (quantization/equivalents.py); "auto"
        measures all on the first half of the text. All but "none" hold the model in
        memory.
    """

    scheme: str
    data: str | None = None
    calibration: str = "none"

    def __post_init__(self) -> None:
        """Checks that there is a text to choose by.

        Raises:
          InputError: there is none.
        """
        if self.calibration == "auto" and self.data is None:
            raise config_lib.InputError("--calibration=auto needs a text: give --data.")


def quantize(
    checkpoint: str,
    target: str,
    options: Options,
    overrides: Sequence[command_line.Override] = (),
) -> dict[str, Any]:
    """Writes a quantized model to the new folder `target`, and describes it there.

    Args:
      checkpoint: a run folder (its newest step), a step folder or a Hugging Face
        folder.
      target: a folder that does not exist.
      options: scheme, text and calibration.
      overrides: of the model's config.

    Returns:
      The content of MANIFEST: scheme, source, calibration, the bytes of the tensors by
      their number type, and the bits per byte of the text, of its second half where
      its first has chosen the calibration.

    Raises:
      InputError: see `conversion.convert`, or the text cannot be scored; or the source
        is quantized already.
    """
    target = os.path.expanduser(target)
    source = loading.find(checkpoint)
    if source.is_quantized:
        raise config_lib.InputError(
            f"{checkpoint} is quantized already; take the model that it was made of."
        )
    config = loading.read_config(source, overrides)
    shapes = transformer.abstract_params(config)
    report: dict[str, Any] = {
        "scheme": options.scheme,
        "source": str(source.weights),
        "num_parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)),
        "calibration": options.calibration,
    }
    if options.data is None and options.calibration == "none":
        conversion.convert(checkpoint, target, "hf", overrides, options.scheme)
    else:
        report |= _calibrated(checkpoint, target, options, overrides)
    sizes = _bytes_by_dtype(pathlib.Path(target))
    report |= {"bytes": sum(sizes.values()), "bytes_by_dtype": dict(sizes)}
    text = json.dumps(report, indent=2)
    files.write_text(pathlib.Path(target) / MANIFEST, text + "\n")
    return report


def _calibrated(
    checkpoint: str,
    target: str,
    options: Options,
    overrides: Sequence[command_line.Override],
) -> dict[str, Any]:
    """Chooses how to rewrite the weights, writes the folder, and scores both."""
    config, params, tokenizer = loading.load_model(checkpoint, overrides)
    report: dict[str, Any] = {}
    rows, method = None, options.calibration
    if options.data is not None:
        report["data"] = options.data
        rows = _rows(checkpoint, options.data, config, tokenizer)
        if method == "auto":
            first, rows = _halves(rows)
            tried = _measured(params, config, first, options.scheme)
            method = min(tried, key=tried.__getitem__)
            report["bits_per_byte_of_calibrations"] = tried
        report["bits_per_byte_before"] = _bits_per_byte(params, config, rows)
    if method == "none":
        conversion.convert(checkpoint, target, "hf", overrides, options.scheme)
    else:
        changed = equivalents.rewritten(params, method)
        _write(loading.find(checkpoint), changed, config, target, options.scheme)
    if rows is not None:
        own = [(f"model.{name}", getattr(config, name)) for name in _UNWRITTEN]
        config, params, _ = quantized_loading.load_model(target, own)
        report["bits_per_byte"] = _bits_per_byte(params, config, rows)
    return report | {"calibration": method}


def _rows(
    checkpoint: str,
    data: str,
    config: config_lib.ModelConfig,
    tokenizer: tokenizer_lib.Tokenizer | None,
) -> scoring.Rows:
    """Returns the rows of a text.

    Raises:
      InputError: it cannot be read, or the model has no tokenizer.
    """
    if tokenizer is None:
        raise config_lib.InputError(
            f"{checkpoint} has no tokenizer.json, so --data cannot be encoded; copy "
            f"one there, or leave --data out."
        )
    length = loading.context_length(checkpoint, config)
    return scoring.rows_of_text(scoring.read_text(data), tokenizer, length)


def _halves(rows: scoring.Rows) -> tuple[scoring.Rows, scoring.Rows]:
    """Cuts a text into halves; a single row is both."""
    middle = len(rows["tokens"]) // 2
    first = {name: x[: middle or None] for name, x in rows.items()}
    return first, {name: x[middle:] for name, x in rows.items()}


def _measured(
    params: dict, config: config_lib.ModelConfig, rows: scoring.Rows, scheme: str
) -> dict[str, float]:
    """Returns the bits per byte after every rewriting and the rounding."""
    dims = transformer.param_dims(config)
    round_all = jax.jit(lambda p: schemes.quantized(p, dims, schemes.SCHEMES[scheme]))
    found: dict[str, float] = {}
    for method in config_lib.CALIBRATIONS:
        rounded = round_all(equivalents.rewritten(params, method))
        found[method] = _bits_per_byte(rounded, config, rows)
        logging.info("Calibration %s: %.5f bits per byte.", method, found[method])
    return found


def _bits_per_byte(
    params: dict, config: config_lib.ModelConfig, rows: scoring.Rows
) -> float:
    return scoring.summarize(rows, scoring.score(params, config, rows))["bits_per_byte"]


def _write(
    source: loading.Source,
    params: dict,
    config: config_lib.ModelConfig,
    target: str,
    scheme: str,
) -> None:
    """Writes rewritten parameters, with the files beside their source."""
    arrays, _ = leaves_lib.flatten(params)
    leaves = {path: leaves_lib.DeviceLeaf(array) for path, array in arrays.items()}
    original = companions.original_config(source)
    with new_folder.new_folder(target) as partial:
        huggingface_export.write_leaves(
            leaves, config, partial, scheme, extra_config=original
        )
        companions.copy_texts(source, partial)


def _bytes_by_dtype(folder: pathlib.Path) -> collections.Counter:
    """Sums the bytes of a folder's tensors by their number type."""
    sizes: collections.Counter = collections.Counter()
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in safetensors_file.read_header(file).values():
            kind = safetensors_file.DTYPES[tensor.dtype]
            sizes[tensor.dtype] += math.prod(tensor.shape) * kind.itemsize
    return sizes
