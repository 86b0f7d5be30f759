"""Pins the steps of other runs that a run reads, so that each start reads the same.

Those runs may go on meanwhile. The steps are part of a checkpoint's metadata.
"""

import json
from collections.abc import Mapping

from glm5_jax import config as config_lib
from glm5_jax.processes import together
from glm5_jax.storage import bucket, copies
from glm5_jax.weights import loading

Steps = Mapping[str, int]  # by folder, as the config names it


def resolve(config: config_lib.TrainConfig, known: Steps | None) -> dict[str, int]:
    """Returns the steps to read of init_from, of the reference and of the teachers.

    A folder without steps of its own, such as one of Hugging Face, is left out.

    Args:
      config: of the run.
      known: steps that earlier starts of the run have read, others are the newest;
        None: this is the first start, which alone reads init_from.

    Raises:
      InputError: nothing usable is in a folder.
    """
    names = [config.reference, *config.teachers]
    names += [config.init_from] if known is None else []
    old = known or {}

    def found() -> str:
        new = {x: _newest(x) for x in names if x is not None and x not in old}
        return json.dumps({x: step for x, step in new.items() if step is not None})

    return {**old, **json.loads(together.from_first("pinned", found))}


def _newest(folder: str) -> int | None:
    """Returns the newest step of a run; None: the folder is no run's."""
    source = loading.find(folder)
    is_run = not (source.is_huggingface or source.is_step)
    return int(source.weights.name) if is_run else None


def path(steps: Steps, folder: str) -> str:
    """Returns the place of what a run reads of a folder: its pinned step, or itself."""
    if folder not in steps:
        return folder
    step = f"checkpoints/{steps[folder]}"
    if bucket.is_address(folder) and (copy := copies.local(folder) / step).is_dir():
        return str(copy)  # of the newest step, as it was asked for before
    return f"{folder}/{step}"


def explanation(steps: Steps, folder: str) -> str:
    """Says, for an error's message, why that step is read."""
    if folder not in steps:
        return ""
    return (
        f" The run began with step {steps[folder]} of {folder} and reads no other; "
        f"copy that step back, or begin another run with --workdir."
    )
