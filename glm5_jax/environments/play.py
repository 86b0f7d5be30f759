"""Plays a task by hand, or shows how its solution is played: the command `play`.

A line is a turn. Where the task has tools, "/NAME ARGUMENT" calls one: the rest of the
line is the value of its only or first argument, or a JSON object of all of them. Any
other line is a text of the assistant, which ends the episode of most tasks.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from glm5_jax import config, environments, messages
from glm5_jax.environments import proofs, protocol, threads


def play(
    name: str, split: str, seed: int, index: int, *, shows_solution: bool = False
) -> float | None:
    """Plays a task; returns its reward, if it ended.

    Args:
        name: of the taskset.
        split: of the task; "" takes the first.
        seed: of the task.
        index: of the task.
        shows_solution: plays the solution instead of lines from standard input.

    Raises:
        config.InputError: there is no such taskset, a line calls no tool, or no
            solution is known.
    """
    taskset = environments.make(name)
    task = taskset.task(split or protocol.splits(taskset)[0], seed, index)
    turns = _solution(taskset, task) if shows_solution else _typed(task)
    return asyncio.run(_episode(taskset, task, turns))


async def _episode(
    taskset: protocol.Taskset,
    task: protocol.Task,
    turns: AsyncIterator[messages.Message],
) -> float | None:
    part, own = protocol.part_of(taskset, task)
    # Else ctrl-C waits for the thread that reads a line.
    asyncio.get_running_loop().set_default_executor(threads.Threads())
    environment = part.environment()
    if not isinstance(environment, protocol.Environment):
        raise config.InputError(
            f"The task {task.id!r} of {part.name!r} is played by a program of its own; "
            f"a mixture has others at another --index."
        )
    _say(f"{task.id}\n{_signatures(task.tools)}")
    try:
        _show(await environment.reset(own))
        async for turn in turns:
            result = await environment.step(turn)
            _show(result.messages)
            if result.terminated or result.truncated:
                total = result.reward.total if result.reward else None
                parts = dict(result.reward.parts) if result.reward else {}
                _say(f"[reward] {total} {json.dumps(parts)}")
                return total
    finally:
        await environment.close()
    _say("[end of input] the episode has no reward")
    return None


async def _typed(task: protocol.Task) -> AsyncIterator[messages.Message]:
    """Yields the turns of lines from standard input."""
    while line := await asyncio.to_thread(_next_line):
        yield turn_of(line.rstrip("\n"), task.tools)


async def _solution(
    taskset: protocol.Taskset, task: protocol.Task
) -> AsyncIterator[messages.Message]:
    """Yields the turns of the solution, and shows each as it would be typed.

    Raises:
        config.InputError: the taskset knows none.
    """
    attempts = proofs.attempts_of(taskset, task)
    if attempts is None:
        raise config.InputError(f"{taskset.name!r} knows no solution of {task.id}.")
    for turn in attempts.right:
        said = [turn.get("content")] if turn.get("content") else []
        for call in messages.calls_in(turn):
            name, arguments = messages.call_of(call)
            given = f" {json.dumps(arguments, ensure_ascii=False)}" if arguments else ""
            said.append(f"/{name}{given}")
        for line in "\n".join(map(str, said)).splitlines():
            _say(f"> {line}")
        yield turn


def turn_of(line: str, tools: Iterable[Mapping[str, Any]]) -> messages.Message:
    """Returns the assistant's turn of a line.

    Raises:
        config.InputError: it calls a tool that the task does not have.
    """
    if not line.startswith("/"):
        return {"role": "assistant", "content": line}
    name, _, rest = line[1:].partition(" ")
    known = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name not in known:
        raise config.InputError(f"There is no tool {name!r}; there are {[*known]}.")
    arguments = _arguments(rest, known[name])
    function = {"name": name, "arguments": arguments}
    call = {"id": f"call_{uuid.uuid4().hex[:8]}", "type": "function"}
    calls = [{**call, "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _arguments(text: str, function: Mapping[str, Any]) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            pass  # the text of the first argument
    properties = function["parameters"].get("properties", {})
    if not properties or not text:
        return {}
    name, kind = next(iter(properties.items()))
    is_number = kind.get("type") == "integer" and text.removeprefix("-").isdecimal()
    return {name: int(text) if is_number else text}


def _signatures(tools: Iterable[Mapping[str, Any]]) -> str:
    """Returns a line for each tool."""
    lines = []
    for tool in tools:
        function = tool["function"]
        names = ", ".join(function["parameters"].get("properties", {}))
        told = function.get("description", "")
        lines.append(f"/{function['name']} ({names}): {told}".rstrip(" :"))
    return "\n".join(lines)


def _next_line() -> str:
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    return sys.stdin.readline()


def _show(said: Iterable[messages.Message]) -> None:
    for message in said:
        _say(f"[{message['role']}] {message.get('content') or ''}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text.rstrip()}\n")
    sys.stdout.flush()
