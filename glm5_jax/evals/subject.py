"""Reads the model of a folder to evaluate it."""

import hashlib
import pathlib
from collections.abc import Sequence

from absl import logging
from jax.sharding import Mesh

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manifest
from glm5_jax.data.preparation import prepared
from glm5_jax.evals import record
from glm5_jax.weights import loading, quantized_loading


def load(
    path: loading.Path,
    overrides: Sequence[command_line.Override] = (),
    mesh: Mesh | None = None,
    scheme: str = quantized_loading.STORED,
) -> record.Subject:
    """Returns the model of a run folder, a step folder or a Hugging Face folder.

    Args:
      path: of the folder.
      overrides: pairs such as ("model.index_topk", "32").
      mesh: devices that share the parameters; None puts them on the first device.
      scheme: of quantization; STORED leaves the weights as they are, codes too.

    Raises:
      InputError: nothing usable is there, or its parts do not fit together.
    """
    config, params, tokenizer = quantized_loading.load_model(
        path, overrides, mesh, scheme
    )
    source = loading.find(path)
    return record.Subject(
        config=config,
        params=params,
        tokenizer=tokenizer,
        identity=_identity(source.weights, scheme),
        corpus=_corpus(source),
    )


def corpus_of(config: config_lib.TrainConfig) -> record.Corpus:
    """Returns the texts of a run; Python's own where the run has no texts to read.

    Of a prepared run the percentage of its folders counts, so that a source given
    instead, such as the one that was prepared, is split in the same way.

    Raises:
      InputError: a prepared folder cannot be read.
    """
    data = config.data
    if config.stage_record.feed != "text":
        return record.Corpus()
    if prepared.is_prepared(data):
        return record.Corpus(percent=prepared.held_out_percent(data))
    return record.Corpus(source=data.source, percent=data.held_out_percent)


def _corpus(source: loading.Source) -> record.Corpus:
    """Returns the texts of the run in a folder; of another folder Python's own."""
    if source.is_huggingface:
        return record.Corpus()
    try:
        return corpus_of(command_line.resolve(source.settings))
    except config_lib.InputError as error:  # a run of an earlier version
        logging.warning("The run's data is not known, Python's is read: %s", error)
        return record.Corpus()


def _identity(weights: pathlib.Path, scheme: str) -> str:
    """Returns a digest of the weights' files, and of what they are rounded to.

    A step has a manifest of all bytes; of other folders the files' names, sizes and
    times of writing count.
    """
    digest = hashlib.sha256()
    if scheme != quantized_loading.STORED:
        digest.update(scheme.encode())
    if (weights / manifest.NAME).exists():
        digest.update((weights / manifest.NAME).read_bytes())
        return digest.hexdigest()
    for path in sorted(weights.rglob("*")):
        if path.is_file():
            facts = path.stat()
            name = path.relative_to(weights).as_posix()
            digest.update(f"{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
