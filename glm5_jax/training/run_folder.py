"""A run's folder: whose it is, and the small files in it.

config.json (resolved), metrics.jsonl, summary.json (written last), checkpoints/STEP/,
samples/STEP.txt, tokenizer.json, loss.png.
"""

import json
import os
import pathlib
from typing import Any

from glm5_jax import command_line
from glm5_jax import config as config_lib

# What may differ between two starts of one run: none of it changes a computed number,
# but for num_steps, which moves the end of the schedule.
MAY_CHANGE = (
    *("num_steps", "log_every", "eval_every", "eval_batches", "checkpoint_every"),
    *("sample_every", "sample_prompt", "sample_tokens", "checkpoints_to_keep"),
    *("data.cache_dir", "data.num_prefetch"),
    *("rl.max_logprob_gap", "rl.num_eval_tasks"),
)
_MAX_SHOWN = 5


def claim(workdir: pathlib.Path, config: config_lib.TrainConfig) -> None:
    """Makes the folder, or checks that it belongs to the same run; writes config.json.

    A run that never came to its first step (its corpus was not found, say) holds
    nothing, and its folder may be another's.

    Raises:
      InputError: it cannot be written, or belongs to another run.
    """
    path = workdir / "config.json"
    if path.exists():
        if (workdir / "metrics.jsonl").exists():
            _require_same_run(path, config)
    elif workdir.is_dir() and any(workdir.iterdir()):
        raise config_lib.InputError(
            f"{workdir} is not empty and holds no run (no config.json); give another "
            f"--workdir, so that nothing in it is overwritten."
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, command_line.to_json_dict(config))
    except OSError as error:
        raise config_lib.InputError(
            f"cannot write into {workdir}: {error.strerror}; give a --workdir in which "
            f"you may create files."
        ) from error


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)


def _require_same_run(path: pathlib.Path, config: config_lib.TrainConfig) -> None:
    try:
        theirs = _flat(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise config_lib.InputError(
            f"{path} cannot be read ({error}); give another --workdir."
        ) from error
    ours = _flat(command_line.to_json_dict(config))
    differing = [
        f"{key}: {theirs.get(key, 'absent')} there, {ours.get(key, 'absent')} here"
        for key in sorted(theirs | ours)
        if key not in MAY_CHANGE and theirs.get(key) != ours.get(key)
    ]
    if differing:
        more = len(differing) - _MAX_SHOWN
        shown = differing[:_MAX_SHOWN] + [f"and {more} more"] * (more > 0)
        raise config_lib.InputError(
            f"{path.parent} belongs to another run; give another --workdir, or its "
            f"config. They differ in\n  " + "\n  ".join(shown)
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out
