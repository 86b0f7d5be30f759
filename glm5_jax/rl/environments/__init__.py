"""Environments: what a model is asked to do, and what it earns."""

import difflib

from glm5_jax import config
from glm5_jax.data import tasks
from glm5_jax.rl.environments import calculator, ladder, protocol, reasoning_gym

_TOOLS: dict[str, calculator.Tool] = {
    "calculator": "told",
    "calculator_untold": "untold",
    "calculator_without_tool": "none",
}


def make(name: str) -> protocol.Taskset:
    """The taskset of a name: a kind, and its size if one likes.

    Args:
        name: of `names()`, e.g. "reverse", "reverse:3-6", "calculator_untold:2-3", or
            "reasoning_gym:NAME".

    Raises:
        config.InputError: there is no such taskset or size, or an extra is missing.
    """
    if name.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.ReasoningGym(name)
    kind, _, size = name.partition(":")
    if kind not in names():
        close = difflib.get_close_matches(kind, names(), n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise config.InputError(
            f"There is no taskset {kind!r}.{guess} Choose one of {', '.join(names())} "
            f"or {reasoning_gym.PREFIX}NAME."
        )
    if kind in _TOOLS:
        problems = f"calculator:{size}".rstrip(":")
        return calculator.CalculatorTasks(name, problems, _TOOLS[kind])
    return ladder.Ladder(name)


def names() -> tuple[str, ...]:
    """Every kind of taskset that needs no extra."""
    return tuple(sorted({*tasks.names(), ladder.DENSE, *_TOOLS}))
