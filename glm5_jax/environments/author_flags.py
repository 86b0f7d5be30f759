"""The flags of the commands that make tasks: `mine`, and `draft` by a model."""

import pathlib
from collections.abc import Iterator
from typing import Any

from absl import flags

from glm5_jax import config
from glm5_jax.environments import endpoint
from glm5_jax.environments.worlds.terminal.author import run
from glm5_jax.http_server import reach

_WAITS = (1.0, 5.0, 20.0)  # seconds before a busy endpoint is asked again
_BASE_URL = flags.DEFINE_string(
    "base_url", "", "Endpoint of the author, such as http://127.0.0.1:8000/v1."
)
_MODEL = flags.DEFINE_string("model", "", "Name of the author at the endpoint.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "Of the author's sampling.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 4096, "Of an answer of the author.")
_REFINEMENTS = flags.DEFINE_integer(
    "num_refinements", 3, "How often a draft or a recipe that fails may be mended."
)
_MAX_TEST_SECONDS = flags.DEFINE_float(
    "max_test_seconds",
    4.0,
    "CPU seconds of a package's tests; `mine` leaves out packages with slower ones.",
)


def mine(packages: str, out: str, num_tasks: int, seed: int) -> Iterator[str]:
    """Makes tasks of software engineering, and yields lines of JSON with the yield.

    Where no rule finds how a package is tested, the model of the flags is asked.

    Args:
        packages: joined by ",", or a file with one a line.
        out: folder of the tasks.
        num_tasks: of each package, at most.
        seed: of the order in which places are tried.

    Raises:
        config.InputError: a flag or an argument is wrong.
    """
    from glm5_jax.environments.worlds.swe import command
    from glm5_jax.environments.worlds.swe.author import find

    author = None
    if _BASE_URL.value or _MODEL.value:
        ask, refinements = _author("mine"), _REFINEMENTS.value
        author = lambda folder: find.Author(ask, folder, refinements)
    most = _MAX_TEST_SECONDS.value
    yield from command.run(packages, out, num_tasks, seed, most, author)


def draft(
    topics: str, out: str, num_tasks: int, num_repeats: int, num_at_once: int
) -> dict[str, Any]:
    """Makes tasks by the model of the flags, and returns the yield.

    Args:
        topics: joined by ",", or a file with one a line.
        out: folder of the tasks.
        num_tasks: that are tried.
        num_repeats: episodes of each solution.
        num_at_once: tasks at a time.

    Raises:
        config.InputError: a flag or an argument is wrong, or the endpoint does not
            answer.
    """
    settings = run.Settings(
        num_tasks=num_tasks,
        num_refinements=_REFINEMENTS.value,
        num_repeats=num_repeats,
        num_at_once=num_at_once,
    )
    return run.run(_author("draft"), topics, pathlib.Path(out), settings)


def _author(action: str) -> endpoint.Ask:
    """Returns the model that the flags name.

    Args:
        action: of the command, for the error.

    Raises:
        config.InputError: a flag is missing or out of its range.
    """
    if not _BASE_URL.value or not _MODEL.value:
        raise config.InputError(
            f"`{action}` asks a model: --base_url=http://HOST:PORT/v1 and --model=NAME."
        )
    if _TEMPERATURE.value < 0 or _MAX_TOKENS.value < 1:
        raise config.InputError(
            f"--temperature must not be negative and --max_tokens must be positive, "
            f"got {_TEMPERATURE.value} and {_MAX_TOKENS.value}."
        )
    return endpoint.ask(
        _BASE_URL.value,
        _MODEL.value,
        reach.api_key() or "",
        _MAX_TOKENS.value,
        _TEMPERATURE.value,
        _WAITS,
    )
