"""A task at a terminal, and the families that make them."""

import dataclasses
import random
from collections.abc import Callable, Mapping

Make = Callable[[random.Random], "Draft"]


@dataclasses.dataclass(frozen=True)
class Expect:
    """A command that must print a text after the episode, blanks at the ends aside."""

    command: str
    stdout: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A task.

    Attributes:
        instruction: for the agent, who starts in the folder of the files.
        files: the contents at the start, by path.
        setup: commands that run before the agent, e.g. to make a repository.
        solution: commands that do what is asked.
        wrong: commands that do not, but come near.
        expects: what must hold at the end; an agent never sees these commands, which
            run in a new shell after all of its processes have ended.
    """

    instruction: str
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    setup: str = ""
    solution: str
    wrong: tuple[str, ...]
    expects: tuple[Expect, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """Tasks of one kind."""

    make: Make
    needs: tuple[str, ...] = ()  # programs besides those of every Debian system


def names(rng: random.Random, count: int) -> list[str]:
    """Returns different names for files and people."""
    return rng.sample(_NAMES, count)


def answer(text: str) -> tuple[Expect, ...]:
    """Expects a text in answer.txt."""
    return (Expect("cat answer.txt", text),)


_NAMES = [
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "harbor", "iris"),
    *("juniper", "kelp", "lotus", "maple", "nectar", "olive", "pebble", "quartz"),
    *("raven", "sage", "thyme", "umber", "violet", "willow", "yarrow", "zephyr"),
]
