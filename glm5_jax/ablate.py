"""Repeats an ablation: runs its arms over seeds, then writes a table and a plot.

python -m glm5_jax.ablate --study=topk --scale=tiny

--study also takes the path of a file of your own. The folder gets NAME.md with the
table, intervals and what holds, NAME.png and NAME.json. Rerun it to resume.
"""

import pathlib
import shlex
import sys

from absl import flags, logging

from glm5_jax import command_line, compile_cache
from glm5_jax import config as config_lib
from glm5_jax.ablations import study as study_lib
from glm5_jax.config import checks
from glm5_jax.processes import interrupts

_STUDY = flags.DEFINE_string(
    "study", None, "Name of a study, or path of a file of your own."
)
_SCALE = flags.DEFINE_string(
    "scale", "tiny", "tiny (minutes on two cores), small or base."
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each arm.", lower_bound=1)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the runs; default runs/ablate/STUDY-SCALE."
)
_PARALLEL = flags.DEFINE_integer(
    "parallel", 1, "Runs at a time, each a process.", lower_bound=1
)
_ONLY = flags.DEFINE_string("only", None, "Run of that name alone: ARM/seed_N.")
flags.adopt_module_key_flags(compile_cache)  # --help shows them


def main(arguments: command_line.Arguments) -> None:
    """Runs what is missing and writes the report."""
    if arguments.config is not None:
        raise config_lib.InputError(
            "--config=FILE has no effect here, a study has its own config; change it "
            "with --config.a.b=VALUE."
        )
    if not _STUDY.value:
        raise config_lib.InputError(
            f"--study is missing; studies: {', '.join(study_lib.names())}."
        )
    study = study_lib.load(_STUDY.value, _SCALE.value)
    name = pathlib.Path(_STUDY.value).stem
    workdir = _WORKDIR.value or f"runs/ablate/{name}-{_SCALE.value}"
    checks.require_local(workdir, "--workdir")
    from glm5_jax.ablations import report, runner  # jax: after the input is checked

    plan = runner.Plan(
        study=study,
        workdir=pathlib.Path(workdir).expanduser().absolute(),
        num_seeds=_SEEDS.value,
        overrides=arguments.overrides,
    )
    runner.check(plan)
    logging.set_verbosity(logging.INFO)
    compile_cache.enable()
    with interrupts.ending_at_once():
        if _ONLY.value:
            runner.run(plan, runner.only(plan, _ONLY.value))
            return
        runner.run_all(plan, _PARALLEL.value, [sys.executable, *sys.orig_argv[1:]])
    typed = shlex.join(["python", *sys.orig_argv[1:]])
    page = report.write(plan, name, typed)
    print(page.read_text(encoding="utf-8"))
    print(f"Written to {page}.")


if __name__ == "__main__":
    command_line.run(main, interrupted=interrupts.EXIT_TERMINATED)
