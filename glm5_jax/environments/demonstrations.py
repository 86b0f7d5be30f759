"""Plays demonstrations that lack what the environment says between two turns.

A world knows the turns that solve a task, and not what its tools answer. Whoever learns
from these turns must read the answers between them, as in an episode.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from concurrent import futures
from typing import Any

from glm5_jax import config, messages
from glm5_jax.environments import protocol

_AT_ONCE = 8  # episodes; some have a browser
_CALL_SECONDS = 300.0  # of one call of an environment

Conversation = Sequence[messages.Message]


def is_whole(shown: Conversation) -> bool:
    """Tells whether something is said between any two turns of the assistant."""
    roles = [message["role"] for message in shown]
    return ("assistant", "assistant") not in itertools.pairwise(roles)


def whole(
    taskset: protocol.Taskset,
    given: Sequence[tuple[protocol.Task, Conversation]],
) -> list[Conversation]:
    """Returns demonstrations with the environment's messages between their turns.

    Those that are whole are returned as they are. Of the others every turn but the last
    is played, so that nothing is scored.

    Args:
        taskset: of all.
        given: tasks, each with its demonstration.

    Raises:
        config.InputError: a program plays an episode, one fails, or one ends before
            the demonstration does.
    """
    if all(is_whole(shown) for _, shown in given):
        return [shown for _, shown in given]
    for task, shown in given:
        part, _ = protocol.part_of(taskset, task)
        if protocol.has_agents(part) and not is_whole(shown):
            raise config.InputError(
                f"{part.name!r} is played by programs of its own, so demonstrations "
                f"must have the results of their calls."
            )
    return _run(_whole(taskset, given))


async def _whole(
    taskset: protocol.Taskset,
    given: Sequence[tuple[protocol.Task, Conversation]],
) -> list[Conversation]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def of(task: protocol.Task, shown: Conversation) -> Conversation:
        if is_whole(shown):
            return shown
        async with gate:
            try:
                return await _played(taskset, task, shown)
            except Exception as error:
                raise config.InputError(
                    f"{taskset.name!r}: the demonstration of task {task.id!r} could "
                    f"not be played: {type(error).__name__}: {error}"
                ) from error

    try:
        async with asyncio.TaskGroup() as group:
            todo = [group.create_task(of(*one)) for one in given]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the one that stopped the others
    return [task.result() for task in todo]


async def _played(
    taskset: protocol.Taskset, task: protocol.Task, shown: Conversation
) -> Conversation:
    turns = [message for message in shown if message["role"] == "assistant"]
    environment = taskset.environment()
    assert isinstance(environment, protocol.Environment)
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            said = [*await environment.reset(task)]
        for turn in turns[:-1]:
            async with asyncio.timeout(_CALL_SECONDS):
                result = await environment.step(turn)
            if result.terminated or result.truncated:
                raise ValueError("the episode ends before its last turn")
            said += [turn, *result.messages]
        return [*said, turns[-1]]
    finally:
        await environment.close()


def _run(main: Coroutine[Any, Any, list[Conversation]]) -> list[Conversation]:
    """Runs a coroutine, also while a loop is running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    with futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, main).result()
