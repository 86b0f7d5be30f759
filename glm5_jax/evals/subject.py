"""Reads the model of a folder to evaluate it."""

import hashlib
import pathlib
from collections.abc import Sequence

from jax.sharding import Mesh

from glm5_jax import command_line
from glm5_jax.checkpoint import manifest
from glm5_jax.evals import record
from glm5_jax.weights import loading


def load(
    path: loading.Path,
    overrides: Sequence[command_line.Override] = (),
    mesh: Mesh | None = None,
) -> record.Subject:
    """Returns the model of a run folder, a step folder or a Hugging Face folder.

    Args:
      path: of the folder.
      overrides: pairs such as ("model.index_topk", "32").
      mesh: devices that share the parameters; None puts them on the first device.

    Raises:
      InputError: nothing usable is there, or its parts do not fit together.
    """
    config, params, tokenizer = loading.load_model(path, overrides, mesh)
    identity = _identity(loading.find(path).weights)
    return record.Subject(
        config=config, params=params, tokenizer=tokenizer, identity=identity
    )


def _identity(weights: pathlib.Path) -> str:
    """Returns a digest of the weights' files.

    A step has a manifest of all bytes; of other folders the files' names, sizes and
    times of writing count.
    """
    digest = hashlib.sha256()
    if (weights / manifest.NAME).exists():
        digest.update((weights / manifest.NAME).read_bytes())
        return digest.hexdigest()
    for path in sorted(weights.rglob("*")):
        if path.is_file():
            facts = path.stat()
            name = path.relative_to(weights).as_posix()
            digest.update(f"{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
