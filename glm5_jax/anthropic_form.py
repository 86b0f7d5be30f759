"""Conversations in Anthropic's form, read into ours (messages.py), and turns back.

Anthropic's messages have lists of blocks: text, thinking, tool_use and tool_result.
https://docs.anthropic.com/en/api/messages
"""

from collections.abc import Iterable, Mapping
from typing import Any

from glm5_jax import config

Block = dict[str, Any]
PATH = "/v1/messages"


def messages_of(
    messages: Iterable[Mapping[str, Any]],
    system: str | Iterable[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Returns messages in our form; a user's may hold results of tools.

    Raises:
        config.InputError: a block is not supported.
    """
    found = [] if system is None else [_said("system", system)]
    for message in messages:
        found += _of_one(message)
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
    if isinstance(content, str) or role not in ("user", "assistant"):
        return [_said(role, content)]
    if not isinstance(content, list) or not all(isinstance(x, dict) for x in content):
        raise config.InputError("content must be a string or a list of blocks.")
    by_kind: dict[Any, list[Block]] = {}
    for block in content:
        by_kind.setdefault(block.get("type"), []).append(block)
    known = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}
    if unknown := {*by_kind} - known:
        raise config.InputError(
            f"A block of type {unknown.pop()!r} is not supported; text, thinking, "
            f"tool_use and tool_result are."
        )
    texts = by_kind.get("text", [])
    if role == "user":
        results = [
            _said("tool", x.get("content")) for x in by_kind.get("tool_result", [])
        ]
        return [*results, *([_said("user", texts)] if texts or not results else [])]
    thought = "".join(str(x.get("thinking", "")) for x in by_kind.get("thinking", []))
    calls = [
        {"name": x.get("name"), "arguments": x.get("input", {})}
        for x in by_kind.get("tool_use", [])
    ]
    more = {"reasoning_content": thought, "tool_calls": calls}
    return [{**_said("assistant", texts), **more}]


def _said(role: Any, content: str | Iterable[Mapping[str, Any]] | None) -> dict:
    """Returns a message of a role; keys of blocks such as cache_control are dropped."""
    if content is not None and not isinstance(content, str):
        content = [{"type": x.get("type"), "text": x.get("text")} for x in content]
    return {"role": role, "content": content}
