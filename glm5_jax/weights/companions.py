"""What a model of others brings beside its weights, and takes along when it leaves.

Tokenizer, chat template, sampling defaults, and keys of config.json that ModelConfig
does not have. They go from a Hugging Face folder into the run folder that it becomes,
from there into every run that starts from it, and out again, byte by byte.
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
# Of a run folder that was a Hugging Face folder: its config.json.
ORIGINAL_CONFIG = "huggingface_config.json"


def copy_texts(source: loading.Source, folder: pathlib.Path) -> None:
    """Copies what belongs to the text as it is."""
    for name in TEXT_FILES:
        if (source.folder / name).exists():
            shutil.copyfile(source.folder / name, folder / name)


def original_config(source: loading.Source) -> dict[str, Any]:
    """The Hugging Face config.json that a model came with, if it did.

    Raises:
      InputError: it is damaged.
    """
    if source.is_huggingface:
        return source.settings
    path = source.folder / ORIGINAL_CONFIG
    try:
        found = huggingface_config.read_json(path) if path.exists() else {}
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        return found
    except ValueError as error:
        raise config_lib.InputError(
            f"{path} is damaged ({error}); delete it to do without the keys that "
            f"glm5_jax does not know."
        ) from error


def into_run(source: loading.Source, folder: pathlib.Path) -> None:
    """Copies all of it into a run folder.

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
    """Gives a training run, before its first checkpoint, what its model brought.

    Where no tokenizer.json lies beside the weights of init_from, what else is there of
    a tokenizer may be another's and stays there.

    Args:
      workdir: folder of the run.
      init_from: what its weights start from, if they do; its tokenizer is the run's.
      tokenizer: of the run.

    Raises:
      InputError: the original config is damaged.
    """
    for name in (*TEXT_FILES, ORIGINAL_CONFIG):  # of a run that did not come so far
        (workdir / name).unlink(missing_ok=True)
    if init_from is not None:
        into_run(loading.find(init_from), workdir)
    if not (workdir / TOKENIZER).exists():
        for name in OF_TOKENIZER:
            (workdir / name).unlink(missing_ok=True)
        tokenizer.save(workdir / TOKENIZER)
