"""Companion files of an imported model: all of its folder but the weights.

These are the tokenizer, the chat template, sampling defaults, and the keys of
config.json that ModelConfig lacks. They are copied byte by byte from a Hugging Face
folder into a run folder, into every run that starts from it, and into the export.
"""

import json
import pathlib
import shutil
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.weights import huggingface_config, loading

TOKENIZER = "tokenizer.json"
OF_TOKENIZER = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt"),
)
TEXT_FILES = (*OF_TOKENIZER, "chat_template.jinja", "generation_config.json")
# Copy of the Hugging Face config.json in the run folder that was made from it.
ORIGINAL_CONFIG = "huggingface_config.json"


def copy_texts(source: loading.Source, folder: pathlib.Path) -> None:
    """Copies the tokenizer, chat template and sampling defaults unchanged."""
    for name in TEXT_FILES:
        if (source.folder / name).exists():
            shutil.copyfile(source.folder / name, folder / name)


def original_config(source: loading.Source) -> dict[str, Any]:
    """Returns the Hugging Face config.json that the model came with, or {}.

    Raises:
      InputError: it is damaged.
    """
    if source.is_huggingface:
        return source.settings
    path = source.folder / ORIGINAL_CONFIG
    try:
        found = huggingface_config.read_json(path) if path.exists() else {}
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except ValueError as error:
        raise config_lib.InputError(
            f"{path} is damaged ({error}). Delete it; an export will then lack the "
            f"keys that glm5_jax does not know."
        ) from error


def into_run(source: loading.Source, folder: pathlib.Path) -> None:
    """Copies the text files and the original config into a run folder.

    Raises:
      InputError: the original config is damaged.
    """
    copy_texts(source, folder)
    if original := original_config(source):
        text = json.dumps(original, indent=2) + "\n"
        (folder / ORIGINAL_CONFIG).write_text(text, encoding="utf-8")


def into_training(
    workdir: pathlib.Path,
    init_from: str | None,
    tokenizer: tokenizer_lib.Tokenizer,
) -> None:
    """Copies a starting model's companions into a new training run.

    A folder without tokenizer.json may hold other tokenizer files that belong to some
    other tokenizer; these are not copied.

    Args:
      workdir: folder of the run.
      init_from: model that the run starts from, or None; it has the run's tokenizer.
      tokenizer: of the run.

    Raises:
      InputError: the original config is damaged.
    """
    for name in (*TEXT_FILES, ORIGINAL_CONFIG):  # left by an earlier, failed start
        (workdir / name).unlink(missing_ok=True)
    if init_from is not None:
        into_run(loading.find(init_from), workdir)
    if not (workdir / TOKENIZER).exists():
        for name in OF_TOKENIZER:
            (workdir / name).unlink(missing_ok=True)
        tokenizer.save(workdir / TOKENIZER)
