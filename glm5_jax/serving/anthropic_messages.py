"""Answers POST /v1/messages, in Anthropic's form, which coding agents speak.

A body becomes that of a chat completion, so both forms share prompt and parser.
"""

import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from glm5_jax.serving import bodies, chat, errors, served, sse, turn

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
Block = dict[str, Any]


class MessagesBody(bodies.Body):
    """The body of a request; max_tokens is reduced to what there is room for."""

    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    @property
    def is_parallel(self) -> bool:
        """Returns whether there may be several calls."""
        return not (self.tool_choice or {}).get("disable_parallel_tool_use", False)

    def as_chat(self, model: served.Served) -> chat.ChatBody:
        """Returns the same request as a chat completion.

        Raises:
            ApiError: a field cannot be used.
            InputError: a message is malformed.
        """
        said: list[dict[str, Any]] = []
        if self.system is not None:
            said.append(_said("system", self.system))
        for message in self.messages:
            said += _messages(message)
        body = chat.ChatBody(
            model=self.model,
            messages=said,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=_choice(self.tool_choice),
            strict_tools=any(tool.get("strict") is True for tool in self.tools or ()),
            parallel_tool_calls=self.is_parallel,
            response_format=_format((self.output_config or {}).get("format")),
            thinking=self.thinking,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )
        if self.max_tokens is not None:
            room = model.room(len(chat.render(model, body)))
            body.max_tokens = min(self.max_tokens, room)
        return body


def count(model: served.Served, body: MessagesBody) -> dict[str, int]:
    """Returns the number of tokens of a prompt."""
    model.require_name(body.model)
    return {"input_tokens": len(chat.render(model, body.as_chat(model)))}


async def whole(talk: chat.Conversation) -> dict[str, Any]:
    """Returns the whole answer."""
    await talk.answers.finish()
    (read,) = talk.answers.turns
    content: list[Block] = []
    if read.reasoning:
        content.append(_block("thinking", read.reasoning))
    if read.content:
        content.append(_block("text", read.content))
    for call in read.calls:
        content.append({**_call(call), "input": json.loads(call.arguments)})
    return {**_head(talk), "content": content, **_end(read), "usage": _usage(talk)}


async def stream(talk: chat.Conversation) -> AsyncIterator[str]:
    """Yields the events of an answer as they come."""
    (read,) = talk.answers.turns
    start = {**_head(talk), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**start, "usage": _usage(talk)})
    index, kind = -1, None  # of the block that is open
    async for _, delta in talk.answers.deltas():
        for new, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if not text:
                continue
            if kind != new:
                if kind is not None:
                    yield _event("content_block_stop", index=index)
                index, kind = index + 1, new
                block = _block(new, "")
                yield _event("content_block_start", index=index, content_block=block)
            more = {"type": f"{new}_delta", new: text}
            yield _event("content_block_delta", index=index, delta=more)
        for call in delta.calls:
            if kind is not None:
                yield _event("content_block_stop", index=index)
            index, kind = index + 1, None
            for text in _call_events(index, call):
                yield text
    if kind is not None:
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(read), usage=_usage(talk))
    yield _event("message_stop")


def _call_events(index: int, call: turn.Call) -> Iterator[str]:
    """Yields the block of a tool call."""
    block = {**_call(call), "input": {}}
    yield _event("content_block_start", index=index, content_block=block)
    more = {"type": "input_json_delta", "partial_json": call.arguments}
    yield _event("content_block_delta", index=index, delta=more)
    yield _event("content_block_stop", index=index)


def _event(name: str, **data: Any) -> str:
    return sse.event({"type": name, **data}, name)


def _head(talk: chat.Conversation) -> dict[str, Any]:
    id, kind = f"msg_{uuid.uuid4().hex}", "message"
    return {"id": id, "type": kind, "role": "assistant", "model": talk.model.name}


def _end(read: turn.Turn) -> dict[str, Any]:
    """Returns why an answer ended."""
    reason = {"length": "max_tokens", "abort": "end_turn", "stop": "end_turn"}
    stop = reason[read.reason]
    if read.stop_string is not None:
        stop = "stop_sequence"
    elif read.calls and read.reason == "stop":
        stop = "tool_use"
    return {"stop_reason": stop, "stop_sequence": read.stop_string}


def _usage(talk: chat.Conversation) -> dict[str, int]:
    """Returns the counts of tokens; those in the cache count apart."""
    (read,) = talk.answers.turns
    return {
        "input_tokens": len(talk.prompt) - read.num_cached,
        "cache_read_input_tokens": read.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(read.tokens),
    }


def _block(kind: str, text: str) -> Block:
    signature = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: text, **signature}


def _call(call: turn.Call) -> Block:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool in OpenAI's form."""
    shown = {name: tool[name] for name in ("name", "description") if name in tool}
    function = {**shown, "parameters": tool.get("input_schema", {})}
    return {"type": "function", "function": function}


def _choice(given: Mapping[str, Any] | None) -> Any:
    """Returns a tool_choice in OpenAI's form."""
    if given is None:
        return None
    if given.get("type") == "tool":
        return {"type": "function", "name": given.get("name")}
    return _CHOICES.get(given.get("type", ""), dict(given))


def _format(given: Any) -> dict[str, Any] | None:
    """Returns an output_config.format as OpenAI's response_format.

    Raises:
        ApiError: it is not a JSON schema.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise errors.bad_request("output_config.format must be of type json_schema.")
    return {"type": "json_schema", "json_schema": dict(given)}


def _messages(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a message in our form; a user's may hold results of tools.

    Raises:
        ApiError: it has a block that is not supported.
    """
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) or role not in ("user", "assistant"):
        return [_said(role, content)]
    if not isinstance(content, list) or not all(isinstance(x, dict) for x in content):
        raise errors.bad_request("content must be a string or a list of blocks.")
    by_kind: dict[Any, list[Block]] = {}
    for block in content:
        by_kind.setdefault(block.get("type"), []).append(block)
    known = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}
    if unknown := {*by_kind} - known:
        raise errors.bad_request(
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
