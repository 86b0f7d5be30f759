"""What an environment is: one episode, asynchronous, in messages and never in tokens.

Its calls must not block: what computes for long, or waits for a process, belongs into
`asyncio.to_thread` or a subprocess. Whoever runs an episode sets time limits on every
call and always calls `close`.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from glm5_jax import messages as messages_lib


class Label(enum.Enum):
    """How an episode ended; its reward counts only if OK or TRUNCATED."""

    OK = "ok"
    TRUNCATED = "truncated"  # out of tokens or turns: scored as it stands
    ENV_ERROR = "env_error"  # the environment failed, not the model: left out
    REWARD_ERROR = "reward_error"  # no finite reward: left out
    TIMEOUT = "timeout"  # the environment did not answer in time: left out

    @property
    def is_scored(self) -> bool:
        """Returns whether the reward counts."""
        return self in (Label.OK, Label.TRUNCATED)


class RewardError(Exception):
    """Scoring failed, not the episode: `step` raises it to be told from a crash."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to do; the same (environment, seed, index) is always the same task."""

    id: str
    messages: tuple[messages_lib.Message, ...]  # the conversation; the user's is last
    answer: Any = None  # what a rule compares with; the model never sees it
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of functions
    problem: str = ""  # tasks of one problem ask the same; "": told by words and answer
    tag: str = ""  # success is measured for each tag too, e.g. for a difficulty
    pays_when_cut: bool = False  # scores a last turn cut off by its length, else 0


@dataclasses.dataclass(frozen=True)
class Reward:
    """What an episode earned."""

    total: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Gymnasium's five values, with messages for observations."""

    messages: tuple[messages_lib.Message, ...]  # after the model's turn; () at the end
    reward: Reward | None  # of the episode, when it is over
    terminated: bool  # the task is over
    truncated: bool  # cut off
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode of one task."""

    async def reset(self, task: Task) -> tuple[messages_lib.Message, ...]:
        """Sets the task up; returns the first messages."""
        ...

    async def step(self, message: messages_lib.Message) -> StepResult:
        """Takes the assistant's turn: content, reasoning_content, tool_calls."""
        ...

    async def close(self) -> None:
        """Frees everything; called once, after whatever happened."""
        ...


@runtime_checkable
class Taskset(Protocol):
    """A source of tasks and of environments that run them."""

    name: str

    def task(self, split: str, seed: int, index: int) -> Task:
        """A task of a split, "train" or "held_out"; no task is in both."""
        ...

    def environment(self) -> Environment:
        """A fresh environment for one episode."""
        ...

    def demonstration(self, task: Task) -> Sequence[messages_lib.Message] | None:
        """A whole conversation that solves the task, for SFT; None if unknown."""
        ...
