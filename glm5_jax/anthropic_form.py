"""Conversations in Anthropic's form, read into ours (messages.py), and turns back.

Anthropic's messages have lists of blocks: text, thinking, tool_use and tool_result.
https://docs.anthropic.com/en/api/messages
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm5_jax import config

Block = dict[str, Any]
PATH = "/v1/messages"
_KINDS = {  # of blocks, by role
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


def messages_of(
    messages: Iterable[Mapping[str, Any]],
    system: str | Iterable[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Returns messages in our form; a user's may hold results of tools.

    Raises:
        config.InputError: a block is not supported, or a content is malformed.
    """
    found = [] if system is None else [_said("system", system, "system")]
    for index, message in enumerate(messages):
        try:
            found += _of_one(message)
        except config.InputError as error:
            raise config.InputError(f"messages[{index}]: {error}") from error
    return found


def tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool in OpenAI's form."""
    shown = {name: given[name] for name in ("name", "description") if name in given}
    function = {**shown, "parameters": given.get("input_schema", {})}
    return {"type": "function", "function": function}


def text_block(kind: str, text: str) -> Block:
    """Returns a block of kind "text" or "thinking"."""
    signature = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: text, **signature}


def call_block(id: str, name: str, arguments: Any) -> Block:
    """Returns the block of a tool call."""
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def _of_one(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or role not in _KINDS:
        return [_said(role, content)]
    by_kind: dict[str, list[Block]] = {kind: [] for kind in _KINDS[role]}
    for block in _blocks(content, "content"):
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in by_kind:
            *most, last = by_kind
            raise config.InputError(
                f"A block of type {kind!r} is not supported in content of role "
                f"{role!r}; {', '.join(most)} and {last} are."
            )
        by_kind[kind].append(block)
    texts = by_kind["text"]
    if role == "user":
        results = [
            _said("tool", x.get("content"), "content of a tool_result")
            for x in by_kind["tool_result"]
        ]
        return [*results, *([_said("user", texts)] if texts or not results else [])]
    thought = "".join(str(x.get("thinking", "")) for x in by_kind["thinking"])
    calls = [
        {"name": x.get("name"), "arguments": x.get("input", {})}
        for x in by_kind["tool_use"]
    ]
    more = {"reasoning_content": thought, "tool_calls": calls}
    return [{**_said("assistant", texts), **more}]


def _said(role: Any, content: Any, field: str = "content") -> dict[str, Any]:
    """Returns a message of a role; keys of blocks such as cache_control are dropped.

    Raises:
        config.InputError: the content, which the field names, is malformed.
    """
    if content is not None and not isinstance(content, str):
        blocks = _blocks(content, field)
        content = [{"type": x.get("type"), "text": x.get("text")} for x in blocks]
    return {"role": role, "content": content}


def _blocks(content: Any, field: str) -> Sequence[Block]:
    """Returns the blocks of a content.

    Raises:
        config.InputError: it is no list of them.
    """
    if not isinstance(content, list) or not all(isinstance(x, dict) for x in content):
        raise config.InputError(f"{field} must be a string or a list of blocks.")
    return content
