"""Plays a task by hand: the command `play`.

A line is a turn. Where the task has tools, "/NAME ARGUMENT" calls one: the rest of the
line is the value of its only or first argument, or a JSON object of all of them. Any
other line is a text of the assistant, which ends the episode of most tasks.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from glm5_jax import config, environments, messages
from glm5_jax.environments import protocol


def play(name: str, split: str, seed: int, index: int) -> float | None:
    """Plays a task with lines from standard input; returns its reward, if it ended.

    Raises:
        config.InputError: there is no such taskset, or a line calls no tool.
    """
    taskset = environments.make(name)
    task = taskset.task(split or protocol.splits(taskset)[0], seed, index)
    return asyncio.run(_episode(taskset, task))


async def _episode(taskset: protocol.Taskset, task: protocol.Task) -> float | None:
    environment = taskset.environment()
    if not isinstance(environment, protocol.Environment):
        raise config.InputError(f"{taskset.name!r} is played by programs of its own.")
    _say(f"{task.id}\n{_signatures(task.tools)}")
    try:
        _show(await environment.reset(task))
        while line := await asyncio.to_thread(_next_line):
            result = await environment.step(turn_of(line.rstrip("\n"), task.tools))
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
        lines.append(f"/{function['name']} ({names}): {function['description']}")
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
