"""Environments: what a model is asked to do, and what it earns."""

from glm5_jax.data import tasks
from glm5_jax.rl.environments import ladder, protocol, reasoning_gym


def make(name: str) -> protocol.Taskset:
    """The taskset of a name.

    Args:
        name: of `names()`, with its size or without ("reverse", "reverse:3-6",
            "calculator_untold:2"), or "reasoning_gym:NAME".

    Raises:
        config.InputError: there is no such taskset or size, or an extra is missing.
    """
    if name.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.ReasoningGym(name)
    return ladder.Ladder(name)


def names() -> tuple[str, ...]:
    """Every kind of taskset that needs no extra."""
    return tasks.names()
