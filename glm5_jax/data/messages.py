"""What a message is, as OpenAI's: its text, its thought, its calls.

A message is a dict: `role` ("system", "user", "assistant" or "tool") and `content`; of
an assistant also `reasoning_content` and `tool_calls` ([{"function": {"name",
"arguments": dict}}]). Two keys are ours: `is_masked` (an assistant's error segment:
kept, but not trained) and `enable_thinking` (turn-level thinking: on any message, for
the assistant's turns from there up to the next user message).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from glm5_jax import config

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # JSON schemas of functions
ROLES = ("system", "user", "assistant", "tool")


def text_of(message: Message, key: str) -> str:
    """A message's text; "" where there is none.

    Raises:
        config.InputError: it is no text.
    """
    text = message.get(key)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise config.InputError(
            f"{key} of a message must be a string, got {type(text).__name__}."
        )
    return text


def call_of(call: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of a tool call; arguments may be JSON, as OpenAI's are.

    Raises:
        config.InputError: it is no call.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name, arguments = None, None
    if isinstance(function, Mapping):
        name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        raise config.InputError(
            f'a tool call must be {{"function": {{"name": string, "arguments": '
            f"object}}}}, got {call!r}."
        )
    return name, arguments


def tool_names(tools: Tools) -> Collection[str]:
    """Names of the functions that the tools describe."""
    return {tool.get("function", tool).get("name") for tool in tools}


def thought_and_content(message: Message) -> tuple[str, str]:
    """An assistant's thought may also stand in its content, closed by </think>."""
    content = text_of(message, "content")
    if message.get("reasoning_content") is not None:
        return text_of(message, "reasoning_content"), content
    thought, closed, rest = content.partition("</think>")
    if not closed:
        return "", content
    return thought.split("<think>")[-1].strip("\n"), rest.lstrip("\n")
