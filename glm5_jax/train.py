"""Trains a model: every stage, from one command.

python -m glm5_jax.train --config=configs/quickstart.py

Resumes if the folder of --workdir holds a run of the same config. On a cluster run the
same command on every host (docs/launching.md).
"""

import contextlib
import datetime
import json
import pathlib

from absl import flags, logging

from glm5_jax import command_line, compile_cache
from glm5_jax.config import checks
from glm5_jax.processes import flags as process_flags
from glm5_jax.processes import group, interrupts, simulate
from glm5_jax.storage import bucket, kept
from glm5_jax.training.run import host_memory

_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run, here or in a bucket (gs://, s3://); default "
    "runs/CONFIG-DATE-TIME. A run in it resumes.",
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Prints parameters and memory, and checks what a start checks."
)
flags.adopt_module_key_flags(process_flags)
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> int | None:
    """Resolves the config and hands over to the loop."""
    config = arguments.train_config()
    if _WORKDIR.value is not None:
        bucket.require_path(_WORKDIR.value, "--workdir")
    if _DRY_RUN.value:
        from glm5_jax.training.reporting import dry_run as report
        from glm5_jax.training.run import preflight

        print(report.dry_run(config), flush=True)
        print(preflight.check(config, _WORKDIR.value))
        return None
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    workdir = _WORKDIR.value or f"runs/{arguments.name}-{now}"
    if process_flags.SIMULATE.value:
        checks.require_local(workdir, "--simulate_processes needs a disk: --workdir")
        count = process_flags.SIMULATE.value
        return simulate.run(config, pathlib.Path(workdir), count)
    me = process_flags.find()
    group.require_supported(config, me)
    host_memory.restart_with_large_pages()
    from glm5_jax.processes import together  # imports jax: after the input is checked

    with together.joined(
        me, process_flags.JOIN_SECONDS.value, process_flags.HEARTBEAT_SECONDS.value
    ):
        from glm5_jax.training import loop

        is_first = together.is_first()
        logging.set_verbosity(logging.INFO if is_first else logging.WARNING)
        compile_cache.enable()
        # Process 0 moves files between a bucket and a folder that all of them share.
        with kept.in_step(workdir) if is_first else contextlib.nullcontext() as here:
            folder = together.from_first("workdir", lambda: str(here))
            summary = loop.train(config, pathlib.Path(folder))
        if is_first:
            print(json.dumps({"workdir": workdir, **summary}, indent=2))
    return None


if __name__ == "__main__":
    command_line.run(main, interrupted=interrupts.EXIT_TERMINATED)
