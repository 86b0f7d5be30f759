"""Reads the episodes that a run has kept: their rewards, or what it learnt from them.

python -m glm5_jax.episodes --run=runs/rl
python -m glm5_jax.episodes --run=runs/rl --steps=10-20 --rescore
python -m glm5_jax.episodes --run=runs/rl --replay
python -m glm5_jax.episodes --run=runs/rl --skipped --steps=9 --replay
python -m glm5_jax.episodes --run=runs/rl --steps=10-20 --html=episodes.html
python -m glm5_jax.episodes --run=runs/rl --watch

Without another flag it lists the steps. --rescore lets the present environment score
the episodes again; it samples nothing and exits with 1 if one gets another reward or
label. --replay learns all steps again without an engine; it exits with 1 if parameters
differ from the run's checkpoint. --html writes a page that shows every token, for a
browser. --watch shows a run that is under way. --skipped takes batches, by number, of
steps that were skipped or undone; --replay of one prints its metrics. docs/episodes.md.
"""

import dataclasses
import json
import pathlib
import sys

from absl import flags, logging

from glm5_jax import command_line, compile_cache
from glm5_jax import config as config_lib
from glm5_jax.storage import copies

_RUN = flags.DEFINE_string("run", None, "Folder of the run.", required=True)
_STEPS = flags.DEFINE_string("steps", "", "Steps to read, as 7 or 10-20; default all.")
_RESCORE = flags.DEFINE_bool("rescore", False, "Scores the episodes again.")
_REPLAY = flags.DEFINE_bool("replay", False, "Learns the steps again.")
_SKIPPED = flags.DEFINE_bool("skipped", False, "Reads the batches in skipped/.")
_HTML = flags.DEFINE_string("html", None, "File that gets a page of the episodes.")
_WATCH = flags.DEFINE_bool("watch", False, "Shows the run until it ends.")
_ENVIRONMENT = flags.DEFINE_string(
    "environment", None, "With --rescore: scores instead of the run's rl.environment."
)
flags.adopt_module_key_flags(compile_cache)


def main(arguments: command_line.Arguments) -> int:
    """Does what the flags ask for."""
    _check()
    workdir = copies.local(_RUN.value)
    if _WATCH.value:
        from glm5_jax.training.reporting import watch

        watch.follow(workdir, print, sys.stdout.isatty())
        return 0
    from glm5_jax.rl import episode_files
    from glm5_jax.training import episode_reports, replay  # import jax: after the flags

    logging.set_verbosity(logging.INFO)
    config = replay.config_of(workdir)
    folder = episode_files.SKIPPED if _SKIPPED.value else episode_files.FOLDER
    numbers = episode_reports.steps_of(workdir, _STEPS.value, folder)
    if _REPLAY.value:
        compile_cache.enable()
        last = numbers[-1] if _STEPS.value or _SKIPPED.value else None
        way = {"skipped": last} if _SKIPPED.value else {"last": last}
        found = replay.replay(workdir, **way)
        print(json.dumps(dataclasses.asdict(found)))
        return int(found.is_same is False)
    steps = episode_files.read_whole(workdir, numbers, folder)
    if _RESCORE.value:
        other = _ENVIRONMENT.value
        lines, counts = episode_reports.rescored(config, workdir, steps, other)
        print("\n".join([*lines, json.dumps(counts)]))
        return int(counts["same"] < counts["episodes"])
    if _HTML.value:
        path = pathlib.Path(_HTML.value).expanduser()
        print(episode_reports.write_page(config, workdir, steps, path))
        return 0
    print("\n".join(episode_reports.listed(steps)))
    return 0


def _check() -> None:
    ways = _RESCORE.value, _REPLAY.value, _HTML.value, _WATCH.value
    if sum(map(bool, ways)) > 1:
        raise config_lib.InputError(
            "give only one of --rescore, --replay, --html and --watch at a time."
        )
    if _ENVIRONMENT.value is not None and not _RESCORE.value:
        raise config_lib.InputError("--environment needs --rescore; add it.")


if __name__ == "__main__":
    command_line.run(main, takes_config=False)
