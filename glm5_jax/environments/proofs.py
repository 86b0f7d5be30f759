"""Proves tasks before anyone learns from them.

A taskset that can be proven has `attempts(task)`: a conversation's turns that solve
the task, and others that must not. `prove` plays them through the ordinary environment:

    the right turns earn 1, every time that they are repeated
    doing nothing earns 0
    wrong turns earn 0
    turns that do a part of a task earn the share that the taskset names, if any
    nothing of solution and scorer can be read while an episode runs, if the taskset
    can look for it: `async leaks(environment, task)` names what it found

Proofs are counted by their source, if the taskset has `source_of(task)`. They are kept
until something about the task changes: its text, its attempts, or, if the taskset has
it, what `scored_by(task)` says of hidden tests and of the programs that run them.
"""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from glm5_jax import messages
from glm5_jax.environments import protocol

Turns = Sequence[messages.Message]
NOTHING: messages.Message = {"role": "assistant", "content": ""}
_MOST_TURNS = 64  # of doing nothing
_CALL_SECONDS = 300.0  # of one call of an environment


@dataclasses.dataclass(frozen=True)
class Attempts:
    """The assistant's turns of episodes of a task."""

    right: Turns
    wrong: tuple[Turns, ...] = ()
    partial: tuple[tuple[Turns, float], ...] = ()  # with the reward of each


@runtime_checkable
class Provable(Protocol):
    """A taskset whose tasks can be proven."""

    def attempts(self, task: protocol.Task) -> Attempts | None:
        """Returns turns that solve the task, and turns that must not; None: unknown."""
        ...


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was found about a task."""

    task: str  # its id
    tag: str
    failures: tuple[str, ...]  # none: the task is proven
    num_episodes: int
    seconds: float  # of all episodes
    source: str = ""  # where the task comes from, if its taskset knows
    megabytes: float = 0.0  # resident at most, of all processes that were started
    sandbox: str = ""  # that commands run in here; "": a service played the episodes

    @property
    def is_proven(self) -> bool:
        """Returns whether nothing failed."""
        return not self.failures


async def prove(
    taskset: protocol.Taskset, task: protocol.Task, num_repeats: int = 10
) -> Proof:
    """Plays the attempts of a task.

    Args:
        taskset: of the task.
        task: to prove.
        num_repeats: episodes of the right turns.
    """
    began, failures, count = time.monotonic(), [], 0

    async def expect(turns: Turns | None, wanted: float, name: str) -> bool:
        nonlocal count
        count += 1
        said = await _reward(taskset, task, turns)
        if said != wanted:
            failures.append(f"{name} earns {said} instead of {wanted:g}")
        return said == wanted

    attempts = attempts_of(taskset, task)
    if attempts is None:
        failures.append("the taskset knows no right turns")
    else:
        for number in range(num_repeats):
            if not await expect(attempts.right, 1.0, f"the solution, run {number + 1}"):
                break
        for number, turns in enumerate(attempts.wrong, 1):
            await expect(turns, 0.0, f"wrong attempt {number}")
        for number, (turns, wanted) in enumerate(attempts.partial, 1):
            await expect(turns, wanted, f"partial attempt {number}")
    await expect(None, 0.0, "doing nothing")
    try:
        found = await _leaks(taskset, task)
    except Exception as error:
        failures.append(f"nobody could look for leaks: {type(error).__name__}: {error}")
    else:
        failures += [f"an agent can read {what}" for what in found]
    seconds = time.monotonic() - began
    source = source_of(taskset, task)
    return Proof(task.id, task.tag, tuple(failures), count, seconds, source)


def source_of(taskset: protocol.Taskset, task: protocol.Task) -> str:
    """Returns where a task comes from, "" if its taskset does not say."""
    told = getattr(taskset, "source_of", None)
    return told(task) if told else ""


def scored_by(taskset: protocol.Taskset, task: protocol.Task) -> str:
    """Returns what decides about a task besides its attempts, "" if nobody says."""
    told = getattr(taskset, "scored_by", None)
    return told(task) if told else ""


async def leaks(
    taskset: protocol.Taskset, environment: protocol.Environment, task: protocol.Task
) -> Sequence[str]:
    """Returns what an agent could read in an episode, () if the taskset cannot look."""
    look = getattr(taskset, "leaks", None)
    return await look(environment, task) if look else ()


def kind(failure: str) -> str:
    """Returns what failed, without the run and what came of it."""
    return failure.split(" earns ")[0].split(", run")[0]


def summarize(proofs: Sequence[Proof]) -> dict[str, Any]:
    """Returns counts of tasks, failures by kind, and seconds a task."""
    kinds = collections.Counter(
        kind(failure) for proof in proofs for failure in proof.failures
    )
    seconds = [proof.seconds for proof in proofs]
    return {
        "tasks": len(proofs),
        "proven": sum(proof.is_proven for proof in proofs),
        "proven_by_tag": _by_tag(proofs),
        "episodes": sum(proof.num_episodes for proof in proofs),
        "failures": dict(kinds.most_common()),
        "seconds_a_task_median": round(_median(seconds), 3),
        "seconds_a_task_most": round(max(seconds, default=0), 3),
        "megabytes_most": max((proof.megabytes for proof in proofs), default=0.0),
        **({"by_source": by_source} if (by_source := _by_source(proofs)) else {}),
    }


def _median(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2] if numbers else 0.0


def _by_tag(proofs: Sequence[Proof]) -> Mapping[str, str]:
    """Returns "proven of all" for every tag."""
    found: dict[str, list[bool]] = {}
    for proof in proofs:
        found.setdefault(proof.tag or "untagged", []).append(proof.is_proven)
    return {tag: f"{sum(x)} of {len(x)}" for tag, x in sorted(found.items())}


def _by_source(proofs: Sequence[Proof]) -> Mapping[str, Mapping[str, Any]]:
    """Returns the figures of the tasks of every source that is known."""
    found: dict[str, list[Proof]] = {}
    for proof in proofs:
        if proof.source:
            found.setdefault(proof.source, []).append(proof)
    return {
        source: {
            "tasks": len(group),
            "proven": sum(proof.is_proven for proof in group),
            "seconds_a_task_median": round(_median([p.seconds for p in group]), 3),
            "megabytes_most": max(proof.megabytes for proof in group),
        }
        for source, group in sorted(found.items())
    }


def attempts_of(taskset: protocol.Taskset, task: protocol.Task) -> Attempts | None:
    """Returns the attempts, or the demonstration alone; None if there is neither."""
    if isinstance(taskset, Provable):
        return taskset.attempts(task)
    shown = taskset.demonstration(task)
    if shown is None:
        return None
    return Attempts([turn for turn in shown if turn["role"] == "assistant"])


async def played(
    environment: protocol.Environment, task: protocol.Task, turns: Turns
) -> float | str:
    """Plays turns to an environment, which the caller closes.

    Returns:
        The reward of the episode, or what became of it.

    Raises:
        Exception: of the environment, or TimeoutError: a call takes too long.
    """
    async with asyncio.timeout(_CALL_SECONDS):
        await environment.reset(task)
    for turn in turns:
        async with asyncio.timeout(_CALL_SECONDS):
            result = await environment.step(turn)
        if result.terminated or result.truncated:
            reward = result.reward
            return "no reward" if reward is None else float(reward.total)
    return "no reward: the episode goes on"


async def _leaks(taskset: protocol.Taskset, task: protocol.Task) -> Sequence[str]:
    """Asks the taskset what an agent could read, at the start of an episode."""
    if not hasattr(taskset, "leaks"):
        return ()
    environment = taskset.environment()
    assert isinstance(environment, protocol.Environment)
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            await environment.reset(task)
        async with asyncio.timeout(_CALL_SECONDS):
            return await leaks(taskset, environment, task)
    finally:
        await _close(environment)


async def _reward(
    taskset: protocol.Taskset, task: protocol.Task, turns: Turns | None
) -> float | str:
    """Returns the reward of an episode of given turns, or what became of it.

    Args:
        taskset: of the task.
        task: to play.
        turns: the assistant's; None does nothing until the episode ends.
    """
    environment = taskset.environment()
    assert isinstance(environment, protocol.Environment)
    given = [NOTHING] * _MOST_TURNS if turns is None else turns
    try:
        try:
            return await played(environment, task, given)
        finally:
            await _close(environment)
    except TimeoutError:
        return "no reward: a call takes too long"
    except Exception as error:
        return f"no reward: {type(error).__name__}: {error}"


async def _close(environment: protocol.Environment) -> None:
    async with asyncio.timeout(_CALL_SECONDS):
        await environment.close()
