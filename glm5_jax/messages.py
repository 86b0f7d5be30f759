"""What a message is, as OpenAI's: its text, its thought, its calls.

A message is a dict: `role` ("system", "user", "assistant" or "tool") and `content`, a
text or a list of {"type": "text", "text": ...}; of an assistant also
`reasoning_content` and `tool_calls` ([{"function": {"name", "arguments": dict}}]). Two
keys are ours: `is_masked` (an assistant's error segment:
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
_KEYS = (
    *("role", "content", "reasoning_content", "tool_calls"),
    *("is_masked", "enable_thinking"),
)
_NAMES = ("name", "tool_call_id", "id")  # say nothing to train
# What others call it, and would be lost.
_MEANT = {
    **dict.fromkeys(("thinking", "reasoning", "thought"), "reasoning_content"),
    "function_call": "tool_calls",
    "weight": "is_masked",
    **dict.fromkeys(("text", "value"), "content"),
    "from": "role",
}


def check(messages: Any, tools: Any = ()) -> None:
    """Checks a conversation to learn from.

    Raises:
        config.InputError: a message has no role or an unknown one, a text is none, a
            call is none or of a tool that is not there, nobody answers.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise config.InputError("messages must be a list with at least one message.")
    known = tool_names(tools)
    for i, message in enumerate(messages):
        try:
            _check_message(message, known)
        except config.InputError as error:
            raise config.InputError(f"messages[{i}]: {error}") from error
    if all(message["role"] != "assistant" for message in messages):
        raise config.InputError(
            "messages must have one of role 'assistant': nothing else is trained."
        )


def unread_keys(message: Message) -> list[str]:
    """Returns the keys that hold something, of which nothing is read."""
    known = {*_KEYS, *_NAMES, *_MEANT}
    return [key for key, value in message.items() if key not in known and value]


def _check_message(message: Any, known: Collection[str]) -> None:
    if not isinstance(message, Mapping):
        raise config.InputError(f"a message must be an object, got {message!r}.")
    for key, meant in _MEANT.items():
        if message.get(key) is not None:
            raise config.InputError(
                f"the key {key!r} is not read, so what it says would be lost; call it "
                f"{meant!r}, or leave it out."
            )
    role_of(message)
    for key in ("is_masked", "enable_thinking"):
        if not isinstance(message.get(key, False), bool):
            raise config.InputError(
                f"{key} must be true or false, got {message[key]!r}."
            )
    if message["role"] == "tool":
        results_of(message)
    else:
        text_of(message, "content")
    text_of(message, "reasoning_content")
    for call in calls_in(message):
        name, _ = call_of(call)
        if name not in known:
            have = ", ".join(sorted(known)) or "none"
            raise config.InputError(
                f"the tool {name!r} is called but not among tools ({have})."
            )


def role_of(message: Message) -> str:
    """The role of a message.

    Raises:
        config.InputError: it has none of ROLES.
    """
    role = message.get("role")
    if role not in ROLES:
        raise config.InputError(
            f"role must be one of {', '.join(ROLES)}; got {role!r}."
        )
    return role


def text_of(message: Message, key: str) -> str:
    """A message's text, or that of its parts; "" where there is none.

    Raises:
        config.InputError: it is no text.
    """
    text = message.get(key)
    if text is None:
        return ""
    if isinstance(text, list | tuple):
        return "".join(_text_of_part(part, key) for part in text)
    if not isinstance(text, str):
        raise config.InputError(
            f"{key} of a message must be a string, got {type(text).__name__}."
        )
    return text


def results_of(message: Message) -> Sequence[str]:
    """The results that a tool's message holds: its text, or a list of several.

    Of a list, a string or {"output": string} is a result; parts of text are one.

    Raises:
        config.InputError: one is neither.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return [text_of(message, "content")]
    if not any(isinstance(part, str) or _is_output(part) for part in content):
        return [text_of(message, "content")]
    return [
        _text_of_part(part["output"] if _is_output(part) else part, "content")
        for part in content
    ]


def _is_output(part: Any) -> bool:
    return isinstance(part, Mapping) and "output" in part


def _text_of_part(part: Any, key: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    is_other = isinstance(part, Mapping) and part.get("type", "text") != "text"
    if is_other or not isinstance(text, str):
        raise config.InputError(
            f'{key} of a message must be a string, or a list of {{"type": "text", '
            f'"text": string}}, got a part {part!r}.'
        )
    return text


def calls_in(message: Message) -> Sequence[Any]:
    """A message's tool calls.

    Raises:
        config.InputError: they are no list.
    """
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise config.InputError(f"tool_calls must be a list, got {calls!r}.")
    return calls


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


def tool_names(tools: Any) -> Collection[str]:
    """Names of the functions that the tools describe.

    Raises:
        config.InputError: one of them is no JSON schema of a function.
    """
    if not isinstance(tools, list | tuple):
        raise config.InputError(f"tools must be a list, got {tools!r}.")
    names = set()
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise config.InputError(
                f"a tool must have a function with a name, got {tool!r}."
            )
        names.add(name)
    return names


def thought_and_content(message: Message) -> tuple[str, str]:
    """An assistant's thought may also stand in its content, closed by </think>."""
    content = text_of(message, "content")
    if message.get("reasoning_content") is not None:
        return text_of(message, "reasoning_content"), content
    if "</think>" not in content:
        return "", content
    # Of several, the template takes the first for the thought, the last for the rest.
    thought, *_, rest = content.split("</think>")
    return thought.split("<think>")[-1].strip("\n"), rest.lstrip("\n")
