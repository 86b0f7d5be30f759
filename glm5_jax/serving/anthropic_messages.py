"""Answers POST /v1/messages, in Anthropic's form, which coding agents speak.

A body becomes that of a chat completion, so both forms share prompt and parser.
"""

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from glm5_jax import anthropic_form
from glm5_jax.http_server import errors
from glm5_jax.serving import bodies, chat, served, sse, turn

COUNT = f"{anthropic_form.PATH}/count_tokens"
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


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
    weight_version: int | None = None
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
        body = chat.ChatBody(
            model=self.model,
            messages=anthropic_form.messages_of(self.messages, self.system),
            tools=[*map(anthropic_form.tool, self.tools or ())] or None,
            tool_choice=_choice(self.tool_choice),
            strict_tools=any(tool.get("strict") is True for tool in self.tools or ()),
            parallel_tool_calls=self.is_parallel,
            response_format=_format((self.output_config or {}).get("format")),
            thinking=self.thinking,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            weight_version=self.weight_version,
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
    talk.answers.require_whole()
    (read,) = talk.answers.turns
    content: list[anthropic_form.Block] = []
    if read.reasoning:
        content.append(anthropic_form.text_block("thinking", read.reasoning))
    if read.content:
        content.append(anthropic_form.text_block("text", read.content))
    for call in read.calls:
        arguments = json.loads(call.arguments)
        content.append(anthropic_form.call_block(call.id, call.name, arguments))
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
                block = anthropic_form.text_block(new, "")
                yield _event("content_block_start", index=index, content_block=block)
            more = {"type": f"{new}_delta", new: text}
            yield _event("content_block_delta", index=index, delta=more)
        for call in delta.calls:
            if kind is not None:
                yield _event("content_block_stop", index=index)
            index, kind = index + 1, None
            for text in _call_events(index, call):
                yield text
    talk.answers.require_whole()
    if kind is not None:
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_end(read), usage=_usage(talk))
    yield _event("message_stop")


def _call_events(index: int, call: turn.Call) -> Iterator[str]:
    """Yields the block of a tool call."""
    block = anthropic_form.call_block(call.id, call.name, {})
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
    stop = {"length": "max_tokens", "stop": "end_turn"}[read.reason]
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


def _choice(given: Mapping[str, Any] | None) -> Any:
    """Returns a tool_choice in OpenAI's form."""
    if given is None:
        return None
    kind = given.get("type")
    if kind == "tool":
        return {"type": "function", "name": given.get("name")}
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind]
    return dict(given)


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
