"""What a service of environments and its clients say to each other, as JSON.

A task goes without its answer, and a result without its `info`: both may hold what
scores an episode.
"""

import math
import numbers
from collections.abc import Mapping
from typing import Any

from glm5_jax.environments import protocol

VERSION = 1  # of what is said
TASKSET, TASKS, EPISODES = "/v1/taskset", "/v1/tasks", "/v1/episodes"
MOST_TASKS = 64  # of one list
# Words of errors, `error.code` of an answer.
UNKNOWN_TASK, UNKNOWN_EPISODE = "unknown_task", "unknown_episode"
BUSY, OVER = "episode_busy", "episode_over"
FULL, DRAINING = "full", "draining"
FAILED, LATE, UNSCORED = "environment_error", "timeout", "reward_error"


def told_task(task: protocol.Task, problem: str) -> dict[str, Any]:
    """Returns what a client may know of a task.

    Args:
        task: of the service.
        problem: the same for tasks that ask the same; it must not tell the answer.
    """
    return {
        "id": task.id,
        "messages": [*task.messages],
        "tools": [*task.tools],
        "problem": problem,
        "tag": task.tag,
        "pays_when_cut": task.pays_when_cut,
    }


def read_task(told: Mapping[str, Any], answer: Any) -> protocol.Task:
    """Returns a client's task.

    Args:
        told: by the service.
        answer: what the client keeps with it.

    Raises:
        ValueError: something else was told.
    """
    try:
        return protocol.Task(
            id=_typed(told["id"], str),
            messages=tuple(_typed(told["messages"], list)),
            answer=answer,
            tools=tuple(_typed(told["tools"], list)),
            problem=_typed(told["problem"], str),
            tag=_typed(told["tag"], str),
            pays_when_cut=_typed(told["pays_when_cut"], bool),
        )
    except (LookupError, TypeError) as error:
        raise ValueError(f"it tells no task: {error!r}") from error


def told_reward(reward: protocol.Reward) -> dict[str, Any]:
    """Returns a reward as JSON.

    Raises:
        protocol.RewardError: a number of it is none, or not finite.
    """
    parts = {str(name): _finite(part) for name, part in reward.parts.items()}
    return {"total": _finite(reward.total), "parts": parts}


def told_step(result: protocol.StepResult) -> dict[str, Any]:
    """Returns a result as JSON.

    Raises:
        protocol.RewardError: see `told_reward`.
    """
    return {
        "messages": [*result.messages],
        "reward": None if result.reward is None else told_reward(result.reward),
        "terminated": bool(result.terminated),
        "truncated": bool(result.truncated),
    }


def read_step(told: Mapping[str, Any]) -> protocol.StepResult:
    """Returns a result that was told.

    Raises:
        ValueError: something else was told.
    """
    try:
        reward = told["reward"]
        if reward is not None:
            reward = protocol.Reward(
                float(reward["total"]),
                {name: float(part) for name, part in reward["parts"].items()},
            )
        return protocol.StepResult(
            tuple(_typed(told["messages"], list)),
            reward,
            _typed(told["terminated"], bool),
            _typed(told["truncated"], bool),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it tells no result of a step: {error!r}") from error


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise protocol.RewardError("a number of the reward is none, or not finite")
    return float(value)
