"""Proves the tasks of a world, or plays one by hand.

python -m glm5_jax.environments validate NAME [--num_tasks=N] [--out=FILE.jsonl]
python -m glm5_jax.environments play NAME [--index=N]
python -m glm5_jax.environments mine PACKAGES --out=FOLDER [--num_tasks=N]
python -m glm5_jax.environments export NAME --out=FOLDER [--num_tasks=N]
python -m glm5_jax.environments draft TOPICS --base_url=URL --model=NAME --out=FOLDER

NAME is what rl.environment takes: reverse:3-6, swe:FOLDER, module:Class, ...

`validate` plays each task's solution ten times, wrong attempts and doing nothing, and
prints one JSON object; the exit code is 1 if a task fails. `play` reads a turn a line:
"/NAME ARGUMENT" calls a tool, anything else is a text. `mine` makes tasks of software
engineering from NAME==VERSION of PyPI, NAME==OLD->NEW for two releases, with more of
them for a chain, debian:NAME, npm:NAME@VERSION or folders, and prints what became of
every candidate. `export` writes Harbor's format. `draft` lets a model write terminal
tasks and keeps those that are proven. Lists are joined by ",", or a file's lines.
"""

import json
import pathlib

from absl import flags, logging

from glm5_jax import command_line, config
from glm5_jax.environments import author_flags

_NUM_TASKS = flags.DEFINE_integer("num_tasks", 20, "Tasks to prove.")
_SPLIT = flags.DEFINE_string("split", "", "train or held_out; default: the first.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the tasks.")
_INDEX = flags.DEFINE_integer("index", 0, "Number of the task to play.")
_NUM_REPEATS = flags.DEFINE_integer("num_repeats", 10, "Episodes of each solution.")
_NUM_AT_ONCE = flags.DEFINE_integer("num_at_once", 4, "Tasks proven at a time.")
_OUT = flags.DEFINE_string(
    "out", None, "File for the proofs, a JSON line a task; folder of tasks to make."
)
flags.adopt_module_key_flags(author_flags)
ACTIONS = ("validate", "play", "mine", "export", "draft")


def main(arguments: command_line.Arguments) -> int:
    """Runs an action; returns 1 if a task is not proven."""
    if len(arguments.words) != 2 or arguments.words[0] not in ACTIONS:
        raise config.InputError(
            f"Give an action and a name: python -m glm5_jax.environments "
            f"{'|'.join(ACTIONS)} NAME; got {' '.join(arguments.words) or 'nothing'}."
        )
    action, name = arguments.words
    from glm5_jax.environments import play, validate

    logging.set_verbosity(logging.INFO)
    if action in ("mine", "draft"):
        return _make(action, name)
    if action == "play":
        play.play(name, _SPLIT.value, _SEED.value, _INDEX.value)
        return 0
    out = pathlib.Path(_OUT.value) if _OUT.value else None
    if action == "export":
        validate.export(name, _SPLIT.value, _SEED.value, _NUM_TASKS.value, out)
        return 0
    settings = validate.Settings(
        num_tasks=_NUM_TASKS.value,
        split=_SPLIT.value,
        seed=_SEED.value,
        num_repeats=_NUM_REPEATS.value,
        num_at_once=_NUM_AT_ONCE.value,
    )
    figures = validate.validate(name, settings, out)
    print(json.dumps(figures, indent=2))
    return int(figures["proven"] < figures["tasks"])


def _make(action: str, name: str) -> int:
    from glm5_jax.environments.worlds.swe import command

    if not _OUT.value:
        raise config.InputError("Give the folder of the tasks: --out=FOLDER.")
    out, count = _OUT.value, _NUM_TASKS.value
    if action == "mine":
        for line in command.run(name, out, count, _SEED.value):
            print(line, flush=True)
    else:
        repeats, at_once = _NUM_REPEATS.value, _NUM_AT_ONCE.value
        told = author_flags.draft(name, out, count, repeats, at_once)
        print(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    command_line.run(main, takes_config=False, num_words=2)
