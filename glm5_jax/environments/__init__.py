"""Environments: tasks for a model, and the rewards of its answers.

protocol.py defines tasks, environments and rewards; read it first. tasks/ has those
that come with the package. Environments exchange messages and never see tokens.
"""

import importlib
import inspect

from glm5_jax import config
from glm5_jax.config import checks, user_classes
from glm5_jax.environments import context, mixture, protocol, python_tool, untold
from glm5_jax.environments.service import remote
from glm5_jax.environments.tasks import ladder, problems, reasoning_gym

# Module and class; `make` imports it, as all of them take half a second.
_WORLDS = {
    "algebra": ("tasks.algebra", "Algebra"),
    "bfcl": ("tasks.function_calls", "FunctionCalls"),
    "business": ("worlds.business.world", "Business"),
    "code": ("worlds.code.world", "Code"),
    "frontend": ("worlds.frontend.world", "Frontend"),
    "harbor": ("harbor.world", "Harbor"),
    "humaneval": ("worlds.code.world", "HumanEval"),
    "math": ("tasks.algebra", "Algebra"),
    "miniwob": ("worlds.miniwob.world", "MiniWoB"),
    "search": ("worlds.search.world", "Search"),
    "slides": ("worlds.slides.world", "Slides"),
    "swe": ("worlds.swe.world", "Swe"),
    "swe_chain": ("worlds.swe.chain.world", "SweChain"),
    "terminal": ("worlds.terminal", "Terminal"),
    **dict.fromkeys(remote.SCHEMES, ("service.remote", "Remote")),
}
_WRAPPERS = {
    context.PREFIX: context.Context,
    python_tool.PREFIX: python_tool.PythonTool,
    untold.PREFIX: untold.Untold,
}
_PREFIXES = (*_WRAPPERS, reasoning_gym.PREFIX)
_CALLS = ("reset", "step", "close")  # of an environment
_CALLS_OF_AGENT = ("play", "close")


def make(name: str) -> protocol.Taskset:
    """Returns the taskset of a name.

    Args:
        name: one of `names()`, with or without a size ("reverse", "reverse:3-6",
            "calculator_untold:2"), "reasoning_gym:NAME", a world ("terminal",
            "terminal:FAMILY", "swe:FOLDER", "swe_chain:FOLDER", "harbor:PATH",
            "search:COLLECTION", "business:DAYS", "code", "humaneval", "slides:PAGES",
            "frontend:FAMILY"), a service ("http://HOST:PORT"), or the user's own
            taskset as "module:Class"; or several, "2*reverse:3-6+gcd" (mixture.py); or
            one with less history, "context:5:search:foldoc" (context.py), with a Python
            tool, "python:gcd" (python_tool.py), or whose prompt does not describe its
            tools, "untold:terminal:cron_line" (untold.py).

    Raises:
        config.InputError: the taskset or size does not exist, an extra is not
            installed, or the user's class breaks the protocol.
    """
    if mixture.SEPARATOR in name:
        return mixture.Mixture(name, make)
    kind, colon, _ = name.partition(":")
    if wrapper := _WRAPPERS.get(kind + colon):
        return wrapper(name, make)
    if world := _WORLDS.get(kind):
        path, class_name = world
        module = importlib.import_module(f"{__name__}.{path}")
        return getattr(module, class_name)(name)
    if name.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.ReasoningGym(name)
    return _own(name) if is_own(name) else ladder.Ladder(name)


def is_own(name: str) -> bool:
    """Returns whether a name is of the user's own class, as "module:Class"."""
    first = name.partition(":")[0]
    ours = {*_WORLDS, *(prefix[:-1] for prefix in _PREFIXES)}
    return user_classes.is_own(name) and first not in ours


def names() -> tuple[str, ...]:
    """Returns every kind of taskset that needs no extra."""
    return problems.names()


def _own(name: str) -> protocol.Taskset:
    """Returns the user's own taskset after trying its first task and environment."""
    taskset = user_classes.make(name, ("task", "environment"))
    try:
        task, environment = taskset.task("train", 0, 0), taskset.environment()
    except Exception as error:
        raise config.InputError(
            f"{name!r}: its first task or environment raised "
            f"{type(error).__name__}: {error}"
        ) from error
    calls = _CALLS_OF_AGENT if hasattr(environment, "play") else _CALLS
    user_classes.require_methods(name, environment, calls)
    blocking = [
        call
        for call in calls
        if not inspect.iscoroutinefunction(getattr(environment, call))
    ]
    checks.require(
        (
            isinstance(getattr(taskset, "name", None), str),
            f"{name!r}: its attribute `name` must be a string.",
        ),
        (
            isinstance(task, protocol.Task),
            f"{name!r}: task() must return a protocol.Task, got {type(task).__name__}.",
        ),
        (
            not blocking,
            f"{name!r}: {', '.join(blocking)} of {type(environment).__name__} must be "
            f"`async def`.",
        ),
    )
    return taskset
