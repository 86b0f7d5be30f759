"""Environments: what a model is asked to do, and what it earns."""

import inspect

from glm5_jax import config
from glm5_jax.config import checks, user_classes
from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import ladder, problems, reasoning_gym

_CALLS = ("reset", "step", "close")  # of an environment


def make(name: str) -> protocol.Taskset:
    """The taskset of a name.

    Args:
        name: of `names()`, with its size or without ("reverse", "reverse:3-6",
            "calculator_untold:2"), "reasoning_gym:NAME", or "module:Class" of a
            taskset of the user's own.

    Raises:
        config.InputError: there is no such taskset or size, an extra is missing, or a
            class of the user's own breaks the protocol.
    """
    if name.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.ReasoningGym(name)
    return _own(name) if user_classes.is_own(name) else ladder.Ladder(name)


def names() -> tuple[str, ...]:
    """Every kind of taskset that needs no extra."""
    return problems.names()


def _own(name: str) -> protocol.Taskset:
    """A taskset of the user's own; its first task and environment are tried."""
    taskset = user_classes.make(name, ("task", "environment"))
    try:
        task, environment = taskset.task("train", 0, 0), taskset.environment()
    except Exception as error:
        raise config.InputError(
            f"{name!r}: its first task or environment raised "
            f"{type(error).__name__}: {error}"
        ) from error
    user_classes.require_methods(name, environment, _CALLS)
    blocking = [
        call
        for call in _CALLS
        if not inspect.iscoroutinefunction(getattr(environment, call))
    ]
    checks.require(
        (
            isinstance(getattr(taskset, "name", None), str),
            f"{name!r}: its attribute `name` must be a text.",
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
