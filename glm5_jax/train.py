"""Trains a model: every stage, from one command.

python -m glm5_jax.train --config=configs/quickstart.py

Goes on by itself where the folder of --workdir holds a run of the same config.
"""

import datetime
import json
import pathlib

from absl import flags, logging

from glm5_jax import command_line
from glm5_jax.training import host_memory

_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run; default runs/CONFIG-DATE-TIME. A run that is there goes on.",
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run",
    False,
    "Prints the resolved config, parameter counts and memory by part, and stops.",
)


def main(arguments: command_line.Arguments) -> None:
    """Resolves the config and hands over to the loop."""
    config = arguments.train_config()
    if _DRY_RUN.value:
        from glm5_jax.training import report

        print(report.dry_run(config))
        return
    host_memory.restart_with_large_pages()
    from glm5_jax.training import loop  # imports jax: after the input is checked

    logging.set_verbosity(logging.INFO)
    workdir = pathlib.Path(_WORKDIR.value or _new_workdir(arguments)).expanduser()
    summary = loop.train(config, workdir)
    print(json.dumps({"workdir": str(workdir), **summary}, indent=2))


def _new_workdir(arguments: command_line.Arguments) -> str:
    """runs/NAME-DATE-TIME, where NAME is the config file's."""
    name = pathlib.Path(str(arguments.config).partition(":")[0]).stem
    return f"runs/{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


if __name__ == "__main__":
    command_line.run(main)
