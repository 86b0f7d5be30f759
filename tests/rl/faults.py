"""Environments that each fail in one way, to test the code that runs episodes.

Without its fault an environment answers a turn "OK" with reward 1, so that a test sees
which episodes succeeded.
"""

import asyncio
import dataclasses
import enum
import math
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import protocol

FLOOD_CHARACTERS = 1_000_000
NEVER = 1e9  # seconds


class Fault(enum.Enum):
    """A kind of failure, and the call that fails."""

    NONE = "none"
    HANG_IN_RESET = "hang_in_reset"
    HANG_IN_STEP = "hang_in_step"
    HANG_IN_CLOSE = "hang_in_close"
    CRASH_IN_RESET = "crash_in_reset"
    CRASH_IN_STEP = "crash_in_step"
    CRASH_IN_CLOSE = "crash_in_close"
    FLOOD_IN_RESET = "flood_in_reset"  # a first message of 1 MB
    FLOOD_IN_STEP = "flood_in_step"  # a tool message of 1 MB, then a second turn
    ENDLESS = "endless"  # a message after every turn, without end
    REWARD_NAN = "reward_nan"
    REWARD_INFINITE = "reward_infinite"
    REWARD_TEXT = "reward_text"
    REWARD_NONE = "reward_none"  # terminated without a Reward
    REWARD_TOTAL_NONE = "reward_total_none"
    REWARD_RAISES = "reward_raises"  # protocol.RewardError out of step


REWARDS: dict[Fault, Any] = {
    Fault.REWARD_NAN: math.nan,
    Fault.REWARD_INFINITE: math.inf,
    Fault.REWARD_TEXT: "1.0",
    Fault.REWARD_TOTAL_NONE: None,
}


def reward_of(total: Any) -> protocol.Reward:
    """Makes a reward of any value; avoids the type checks, which runs do not have."""
    reward = protocol.Reward(0.0, {"correct": 1.0})
    object.__setattr__(reward, "total", total)
    return reward


class FaultError(RuntimeError):
    """Raised by a crashing environment."""


@dataclasses.dataclass
class Counts:
    """Numbers of calls that began, over all environments of a taskset."""

    resets: int = 0
    steps: int = 0
    closes: int = 0


class FaultyTaskset:
    """Tasks "say OK" whose environments fail in one way, always or sometimes."""

    def __init__(self, fault: Fault, every: int = 1) -> None:
        """Makes every `every`-th environment faulty, beginning with the first."""
        self.name = f"faulty:{fault.value}"
        self.counts = Counts()
        self._fault, self._every, self._num_made = fault, every, 0

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns the same words always; cut-off answers are scored too."""
        messages = ({"role": "user", "content": "say OK"},)
        id = f"{self.name}/{split}/{seed}/{index}"
        return protocol.Task(id, messages, id, pays_when_cut=True)

    def environment(self) -> protocol.Environment:
        """Returns an environment with the fault, or a working one."""
        is_faulty = self._num_made % self._every == 0
        self._num_made += 1
        return _Faulty(self._fault if is_faulty else Fault.NONE, self.counts)

    def demonstration(self, task: protocol.Task) -> list[messages.Message]:
        """Returns the task and its answer."""
        return [*task.messages, {"role": "assistant", "content": "OK"}]


class _Faulty:
    def __init__(self, fault: Fault, counts: Counts) -> None:
        self._fault, self._counts = fault, counts
        self._num_turns = 0

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        self._counts.resets += 1
        await self._fail("reset")
        if self._fault is Fault.FLOOD_IN_RESET:
            return ({"role": "user", "content": "x" * FLOOD_CHARACTERS},)
        return task.messages

    async def step(self, message: messages.Message) -> protocol.StepResult:
        self._counts.steps += 1
        self._num_turns += 1
        await self._fail("step")
        if self._fault is Fault.ENDLESS:
            return _going_on("again")
        if self._fault is Fault.FLOOD_IN_STEP and self._num_turns == 1:
            return _going_on("x" * FLOOD_CHARACTERS)
        if self._fault is Fault.REWARD_RAISES:
            raise protocol.RewardError("the scorer fell over")
        reward = reward_of(REWARDS.get(self._fault, 1.0))
        reward = None if self._fault is Fault.REWARD_NONE else reward
        return protocol.StepResult((), reward, terminated=True, truncated=False)

    async def close(self) -> None:
        self._counts.closes += 1
        await self._fail("close")

    async def _fail(self, call: str) -> None:
        if self._fault.value == f"hang_in_{call}":
            await asyncio.sleep(NEVER)
        if self._fault.value == f"crash_in_{call}":
            raise FaultError(f"crash in {call}")


def _going_on(content: str) -> protocol.StepResult:
    message = {"role": "tool", "content": content}
    return protocol.StepResult((message,), None, terminated=False, truncated=False)
