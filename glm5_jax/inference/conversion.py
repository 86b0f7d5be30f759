"""Rewrites a model as a Hugging Face folder or as a run folder, tensor by tensor."""

import json
import pathlib
import shutil
from collections.abc import Sequence

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import huggingface, manager
from glm5_jax.inference import loading

FORMATS = ("hf", "orbax")  # a Hugging Face folder, a run folder
# What belongs to the text, not to the weights, goes along as it is.
TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)


def convert(
    source: loading.Path,
    target: loading.Path,
    to: str | None = None,
    overrides: Sequence[command_line.Override] = (),
) -> str:
    """Writes the model at `source` to the new folder `target`, in the dtypes it has.

    Args:
      source: a run folder (its newest step), a step folder or a Hugging Face folder.
      target: a folder that does not exist.
      to: one of FORMATS; None for the one that the source does not have.
      overrides: of the config, see `loading.load_model`.

    Returns:
      The format written.

    Raises:
      InputError: there is no model at `source`, or something at `target`.
    """
    target = pathlib.Path(target).expanduser().absolute()
    if target.exists():
        raise config_lib.InputError(f"{target} exists; choose another target.")
    found = loading.find(source)
    to = to or FORMATS[found.is_huggingface]
    if to not in FORMATS:
        raise config_lib.InputError(f"The format must be hf or orbax, got {to!r}.")
    config, params, _ = loading.load_model(source, overrides)
    if to == "hf":
        huggingface.save_params(params, config, target)
    else:
        step = 0 if found.is_huggingface else int(found.weights.name)
        checkpoints = manager.CheckpointManager(target, keep=1)
        checkpoints.save(step, {"params": params}, {})
        checkpoints.close()
        # Last, for a folder without it holds no model.
        settings = {"model": command_line.to_json_dict(config)}
        (target / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for name in TEXT_FILES:
        if (found.folder / name).exists():
            shutil.copy(found.folder / name, target / name)
    return to
