"""The protocol of environments: a taskset gives tasks, an environment runs one episode.

Environments are asynchronous and exchange messages, never tokens. Their calls must not
block: run long computations in `asyncio.to_thread` or in a subprocess. The caller
limits the time of every call and always calls `close`.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from glm5_jax import messages as messages_lib

SPLITS = ("train", "held_out")


class Label(enum.Enum):
    """The way an episode ended; its reward counts only for OK and TRUNCATED."""

    OK = "ok"
    TRUNCATED = "truncated"  # out of tokens or turns: scored as it is
    ENV_ERROR = "env_error"  # the environment failed, not the model: excluded
    REWARD_ERROR = "reward_error"  # no finite reward: excluded
    TIMEOUT = "timeout"  # the environment was too slow: excluded

    @property
    def is_scored(self) -> bool:
        """Returns whether the reward counts."""
        return self in (Label.OK, Label.TRUNCATED)


class RewardError(Exception):
    """Raised by `step` if only the scoring failed, to tell it from a crash."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task; the same (taskset, split, seed, index) always gives the same one."""

    id: str
    messages: tuple[messages_lib.Message, ...]  # the last one is the user's
    answer: Any = None  # for the scorer; the model never sees it
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of functions
    problem: str = ""  # tasks of one problem ask the same; "": messages and answer tell
    tag: str = ""  # success is measured for each tag too, e.g. for a difficulty
    pays_when_cut: bool = False  # a last turn cut off by its length is scored, not 0


@dataclasses.dataclass(frozen=True)
class Reward:
    """The reward of an episode."""

    total: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Gymnasium's five values, with messages as observations."""

    messages: tuple[messages_lib.Message, ...]  # follow the model's turn; () at the end
    reward: Reward | None  # of the episode, at its end
    terminated: bool  # the task is over
    truncated: bool  # the episode was cut off
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode of one task."""

    async def reset(self, task: Task) -> tuple[messages_lib.Message, ...]:
        """Sets up the task and returns the first messages."""
        ...

    async def step(self, message: messages_lib.Message) -> StepResult:
        """Answers the assistant's turn: content, reasoning_content, tool_calls."""
        ...

    async def close(self) -> None:
        """Frees all resources; called once, also after a failure."""
        ...


@runtime_checkable
class Editor(Protocol):
    """An `Environment` that decides what the model sees of the episode so far."""

    def shown(
        self, history: Sequence[messages_lib.Message]
    ) -> Sequence[messages_lib.Message]:
        """Returns the messages of the next prompt; `history` has all, in order."""
        ...


@runtime_checkable
class Agent(Protocol):
    """One episode that a program of its own plays, which asks the model by itself.

    It takes the place of an `Environment`.
    """

    async def play(self, task: Task, base_url: str) -> StepResult:
        """Runs the program on a task and scores it.

        Args:
          task: to solve.
          base_url: what the program takes for OpenAI's: its chat completions are turns
            of this episode, and so are Anthropic's messages. It holds as long as the
            call.
        """
        ...

    async def close(self) -> None:
        """Frees all resources; called once, also after a failure."""
        ...


@runtime_checkable
class Taskset(Protocol):
    """A source of tasks and of environments that run them.

    One whose environments are an `Agent` says so by an attribute `has_agents = True`,
    one for evaluation alone by `splits = ("held_out",)`. One that is made of others,
    some of which have agents, has their list as `parts` and tells that of a task by
    `part_of(task)`: see `part_of`.
    """

    name: str

    def task(self, split: str, seed: int, index: int) -> Task:
        """Returns a task of a split, "train" or "held_out"; no task is in both."""
        ...

    def environment(self) -> Environment | Agent:
        """Returns a new environment, or agent, for one episode."""
        ...

    def demonstration(self, task: Task) -> Sequence[messages_lib.Message] | None:
        """Returns a conversation that solves the task, for SFT; None if unknown.

        What the environment says between two turns may be left out: demonstrations.py
        plays the turns to learn it.
        """
        ...


def has_agents(taskset: Taskset) -> bool:
    """Returns whether programs of their own play tasks of a taskset."""
    return getattr(taskset, "has_agents", False)


def parts(taskset: Taskset) -> Sequence[Taskset]:
    """Returns the tasksets that one is made of: itself, if it is no mixture."""
    return getattr(taskset, "parts", (taskset,))


def part_of(taskset: Taskset, task: Task) -> tuple[Taskset, Task]:
    """Returns the part of a task, whose environments play it, and its own task.

    They are the taskset and the task themselves, if it is no mixture.
    """
    told = getattr(taskset, "part_of", None)
    return told(task) if told else (taskset, task)


def splits(taskset: Taskset) -> Sequence[str]:
    """Returns the splits in which a taskset has tasks."""
    return getattr(taskset, "splits", SPLITS)
