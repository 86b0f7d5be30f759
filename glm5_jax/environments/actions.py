"""The actions of the command `environments`, and the flags that they share."""

import json
import pathlib
import sys
from collections.abc import Callable, Mapping

from absl import flags

from glm5_jax import config
from glm5_jax.environments import author_flags, play, serve_flags, validate

_NUM_TASKS = flags.DEFINE_integer("num_tasks", 20, "Tasks to prove.")
_SPLIT = flags.DEFINE_string("split", "", "train, held_out, all; default: the first.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the tasks.")
_INDEX = flags.DEFINE_integer("index", 0, "Number of the task to play.")
_SOLUTION = flags.DEFINE_bool("solution", False, "Plays the solution, and shows it.")
_NUM_REPEATS = flags.DEFINE_integer("num_repeats", 10, "Episodes of each solution.")
_NUM_AT_ONCE = flags.DEFINE_integer("num_at_once", 4, "Tasks proven at a time.")
_THROUGH = flags.DEFINE_string(
    "through", "", "Service, http://HOST:PORT, that plays the episodes of a proof."
)
_OUT = flags.DEFINE_string(
    "out", None, "File for the proofs, a JSON line a task; folder of tasks to make."
)


def _validate(name: str) -> int:
    settings = validate.Settings(
        num_tasks=_NUM_TASKS.value,
        split=_SPLIT.value,
        seed=_SEED.value,
        num_repeats=_NUM_REPEATS.value,
        num_at_once=_NUM_AT_ONCE.value,
        through=_THROUGH.value,
    )
    out = pathlib.Path(_OUT.value) if _OUT.value else None
    figures = validate.validate(name, settings, out)
    _say(json.dumps(figures, indent=2))
    return int(figures["proven"] < figures["tasks"])


def _play(name: str) -> int:
    place = _one_split(), _SEED.value, _INDEX.value
    play.play(name, *place, shows_solution=_SOLUTION.value)
    return 0


def _serve(name: str) -> int:
    serve_flags.serve(name)
    return 0


def _mine(name: str) -> int:
    for line in author_flags.mine(name, _folder(), _NUM_TASKS.value, _SEED.value):
        _say(line)
    return 0


def _export(name: str) -> int:
    out = pathlib.Path(_OUT.value) if _OUT.value else None
    validate.export(name, _one_split(), _SEED.value, _NUM_TASKS.value, out)
    return 0


def _draft(topics: str) -> int:
    repeats, at_once = _NUM_REPEATS.value, _NUM_AT_ONCE.value
    told = author_flags.draft(topics, _folder(), _NUM_TASKS.value, repeats, at_once)
    _say(json.dumps(told, indent=2))
    return 0


def _one_split() -> str:
    """Returns the split; "" for the first.

    Raises:
        config.InputError: all are asked for.
    """
    if _SPLIT.value == validate.ALL:
        raise config.InputError(
            f"--split={validate.ALL} is for validate; give train or held_out."
        )
    return _SPLIT.value


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _folder() -> str:
    """Returns the folder of tasks to make.

    Raises:
        config.InputError: it is not given.
    """
    if not _OUT.value:
        raise config.InputError("Give the folder of the tasks: --out=FOLDER.")
    return _OUT.value


ALL: Mapping[str, Callable[[str], int]] = {
    "validate": _validate,
    "play": _play,
    "serve": _serve,
    "mine": _mine,
    "export": _export,
    "draft": _draft,
}
