"""The messages of a conversation, in OpenAI's form.

A message is a dict with a `role` ("system", "user", "assistant" or "tool") and a
`content`: a string, or a list of {"type": "text", "text": ...}. An assistant's message
may also have `reasoning_content` and `tool_calls` ([{"function": {"name", "arguments":
dict}}]). Two keys are our own. `is_masked` keeps an assistant's turn, such as an error,
but does not train it. `enable_thinking`, on any message, switches thinking for the
assistant's turns from there to the next user message.
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
_NAMES = ("name", "tool_call_id", "id")  # known, but never trained
# Names that others use for our keys; their content would be lost.
_MEANT = {
    **dict.fromkeys(("thinking", "reasoning", "thought"), "reasoning_content"),
    "function_call": "tool_calls",
    "weight": "is_masked",
    **dict.fromkeys(("text", "value"), "content"),
    "from": "role",
}


def check(messages: Any, tools: Any = ()) -> None:
    """Checks a conversation for training.

    Raises:
        config.InputError: a role is missing or unknown, a text or a call is malformed,
            a called tool is not among the tools, or there is no assistant's message.
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
    """Returns the keys that have a value but are not read."""
    known = {*_KEYS, *_NAMES, *_MEANT}
    return [key for key, value in message.items() if key not in known and value]


def _check_message(message: Any, known: Collection[str]) -> None:
    if not isinstance(message, Mapping):
        raise config.InputError(f"a message must be an object, got {message!r}.")
    for key, meant in _MEANT.items():
        if message.get(key) is not None:
            raise config.InputError(
                f"the key {key!r} is not read, so its content would be lost; rename "
                f"it to {meant!r}, or remove it."
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
                f"the tool {name!r} is called but is not among the tools ({have})."
            )


def role_of(message: Message) -> str:
    """Returns the role of a message.

    Raises:
        config.InputError: it is not one of ROLES.
    """
    role = message.get("role")
    if role not in ROLES:
        raise config.InputError(
            f"role must be one of {', '.join(ROLES)}; got {role!r}."
        )
    return role


def text_of(message: Message, key: str) -> str:
    """Returns the text of a key, joined from its parts; "" if it is missing.

    Raises:
        config.InputError: the value is no text.
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
    """Returns the results in a tool's message: its text, or several from a list.

    In a list, each string or {"output": string} is one result. A list that has only
    parts of text is one result.

    Raises:
        config.InputError: an item of the list is neither.
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
    """Returns a message's tool calls.

    Raises:
        config.InputError: tool_calls is no list.
    """
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise config.InputError(f"tool_calls must be a list, got {calls!r}.")
    return calls


def call_of(call: Any) -> tuple[str, Mapping[str, Any]]:
    """Returns name and arguments of a tool call; arguments may be a JSON string.

    Raises:
        config.InputError: the call is malformed.
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
    """Returns the names of the functions that the tools describe.

    Raises:
        config.InputError: a tool is no JSON schema of a function.
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
    """Returns an assistant's thought and content.

    The thought may also be at the start of the content, closed by </think>.
    """
    content = text_of(message, "content")
    if message.get("reasoning_content") is not None:
        return text_of(message, "reasoning_content"), content
    if "</think>" not in content:
        return "", content
    # The template ends the thought at the first </think>, and content follows the last.
    thought, *_, rest = content.split("</think>")
    return thought.split("<think>")[-1].strip("\n"), rest.lstrip("\n")
