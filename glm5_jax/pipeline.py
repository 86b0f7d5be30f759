"""Runs a recipe: all stages of training, one from the other, and a report of them.

python -m glm5_jax.pipeline --recipe=small --workdir=runs/small

After a kill, the same command resumes. It ends with WORKDIR/report.html, which is one
file, and WORKDIR/report.md (docs/pipeline.md).
"""

import datetime
import json
import pathlib

from absl import flags, logging

from glm5_jax import command_line, compile_cache
from glm5_jax.config import checks
from glm5_jax.processes import interrupts
from glm5_jax.training.run import host_memory

_RECIPE = flags.DEFINE_string(
    "recipe", None, "Name of the recipe: small, tiny.", required=True
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the pipeline; default runs/RECIPE-DATE-TIME. A pipeline in it resumes.",
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the documents, the parameters and the order of the data."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Prints the stages and checks their configs; writes nothing."
)
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Finds the recipe and hands over to the runner."""
    del arguments
    from glm5_jax.recipes import catalogue

    recipe = catalogue.find(_RECIPE.value)
    checks.require(checks.seed_rule(_SEED.value))
    now = f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    given = _WORKDIR.value
    if given is not None:
        checks.require_local(given, "--workdir")
    workdir = pathlib.Path(given or f"runs/{recipe.name}-{now}")
    if not _DRY_RUN.value:
        host_memory.restart_with_large_pages()
    from glm5_jax.recipes import runner  # imports jax: after the input is checked

    if _DRY_RUN.value:
        print(runner.plan(recipe, workdir, _SEED.value))
        return
    logging.set_verbosity(logging.INFO)
    compile_cache.enable()
    summary = runner.run(recipe, workdir, _SEED.value)
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    command_line.run(main, takes_config=False, interrupted=interrupts.EXIT_TERMINATED)
