"""Answers POST /v1/responses, in the newer of OpenAI's forms.

The server keeps no conversations: a client sends the whole of it in `input`. A body
becomes that of a chat completion, so both forms share prompt and parser.
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from glm5_jax.http_server import errors
from glm5_jax.serving import bodies, chat, served, sse, turn

PATH = "/v1/responses"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
Item = dict[str, Any]


class ResponsesBody(bodies.Body):
    """The body of a request."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    weight_version: int | None = None
    stream: bool | None = None

    def as_chat(self) -> chat.ChatBody:
        """Returns the same request as a chat completion.

        Raises:
            ApiError: a field cannot be used.
        """
        if self.previous_response_id is not None:
            raise errors.bad_request(
                "previous_response_id is not supported, because the server keeps no "
                "conversations; send the whole conversation as input."
            )
        said: list[Item] = []
        if self.instructions is not None:
            said.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            said.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                _append(said, item)
        return chat.ChatBody(
            model=self.model,
            messages=said,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=self.tool_choice,
            strict_tools=any(tool.get("strict") is True for tool in self.tools or ()),
            parallel_tool_calls=self.parallel_tool_calls,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            weight_version=self.weight_version,
            reasoning_effort=(self.reasoning or {}).get("effort"),
            response_format=_format((self.text or {}).get("format")),
        )


class Response:
    """A response under way: its output so far, and the events that tell of it."""

    def __init__(self, talk: chat.Conversation, body: ResponsesBody) -> None:
        """Starts an empty response."""
        (self._read,) = talk.answers.turns
        self._talk, self._body = talk, body
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._output: list[Item] = []
        self._open: str | None = None  # kind of the last item, if it may grow
        self._number = -1  # of the last event

    def json(self) -> dict[str, Any]:
        """Returns the response as it is now."""
        read, body = self._read, self._body
        is_cut = read.end is not None and read.reason == "length"
        status = "in_progress" if read.end is None else "completed"
        why = {"reason": "max_output_tokens"} if is_cut else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_cut else status,
            "error": None,
            "incomplete_details": why,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._talk.model.name,
            "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "metadata": {},
            "usage": None if read.end is None else self._usage(),
        }

    def event(self, name: str, /, **data: Any) -> str:
        """Returns the text of the next event."""
        self._number += 1
        kind = f"response.{name}"
        return sse.event({"type": kind, "sequence_number": self._number, **data}, kind)

    def add(self, delta: turn.Delta) -> Iterator[str]:
        """Adds a delta to the output; yields its events."""
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if text:
                if self._open != kind:
                    yield from self.close()
                    yield from self._begin(kind)
                part = self._output[-1]["content"][0]
                part["text"] += text
                more = {"logprobs": []} if kind == "message" else {}
                yield self._of_part(f"{part['type']}.delta", delta=text, **more)
        for call in delta.calls:
            yield from self.close()
            yield from self._call(call)

    def close(self) -> Iterator[str]:
        """Ends the item that may grow; yields its events."""
        if self._open is None:
            return
        item, part = self._output[-1], self._output[-1]["content"][0]
        more = {"logprobs": []} if self._open == "message" else {}
        yield self._of_part(f"{part['type']}.done", text=part["text"], **more)
        yield self._of_part("content_part.done", part=part)
        item["status"], self._open = "completed", None
        yield self._of_item("output_item.done", item=item)

    def _begin(self, kind: str) -> Iterator[str]:
        """Adds an item with an empty text."""
        item: Item = {"id": f"{kind[:3]}_{uuid.uuid4().hex}", "type": kind}
        part: Item = {"type": "reasoning_text", "text": ""}
        item |= {"status": "in_progress", "content": [part]}
        if kind == "message":
            item["role"] = "assistant"
            part |= {"type": "output_text", "annotations": []}
        else:
            item["summary"] = []
        self._output.append(item)
        self._open = kind
        yield self._of_item("output_item.added", item={**item, "content": []})
        yield self._of_part("content_part.added", part=part)

    def _call(self, call: turn.Call) -> Iterator[str]:
        """Adds a tool call."""
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call"}
        item |= {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        self._output.append({**item, "status": "completed"})
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._of_item("output_item.added", item=begun)
        where = {"item_id": item["id"]}
        name, arguments = "function_call_arguments", call.arguments
        yield self._of_item(f"{name}.delta", delta=arguments, **where)
        done = {"arguments": arguments, "name": call.name}
        yield self._of_item(f"{name}.done", **done, **where)
        yield self._of_item("output_item.done", item=self._output[-1])

    def _of_item(self, name: str, /, **data: Any) -> str:
        return self.event(name, output_index=len(self._output) - 1, **data)

    def _of_part(self, name: str, /, **data: Any) -> str:
        where = {"item_id": self._output[-1]["id"], "content_index": 0}
        return self._of_item(name, **where, **data)

    def _usage(self) -> dict[str, Any]:
        read, size = self._read, len(self._talk.prompt)
        return {
            "input_tokens": size,
            "input_tokens_details": {"cached_tokens": read.num_cached},
            "output_tokens": len(read.tokens),
            "output_tokens_details": {"reasoning_tokens": read.num_reasoning},
            "total_tokens": size + len(read.tokens),
        }


async def begin(model: served.Served, body: ResponsesBody) -> chat.Conversation:
    """Renders a conversation and submits its request."""
    return await chat.begin(model, body.as_chat())


async def whole(talk: chat.Conversation, body: ResponsesBody) -> dict[str, Any]:
    """Returns the whole response."""
    made = Response(talk, body)
    async for _, delta in talk.answers.deltas():
        for _ in made.add(delta):
            pass
    talk.answers.require_whole()
    for _ in made.close():
        pass
    return made.json()


async def stream(talk: chat.Conversation, body: ResponsesBody) -> AsyncIterator[str]:
    """Yields the events of a response as they come."""
    made = Response(talk, body)
    yield made.event("created", response=made.json())
    yield made.event("in_progress", response=made.json())
    async for _, delta in talk.answers.deltas():
        for text in made.add(delta):
            yield text
    talk.answers.require_whole()
    for text in made.close():
        yield text
    found = made.json()
    yield made.event(found["status"], response=found)


def _format(given: Any) -> Any:
    """Returns a text.format in the form of chat completions' response_format."""
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": dict(given)}
    return given


def _append(said: list[Item], item: Mapping[str, Any]) -> None:
    """Appends an item to messages; items of one assistant's turn become one message.

    Raises:
        ApiError: the item is not supported.
    """
    kind, role = item.get("type", "message"), item.get("role")
    if kind == "function_call_output":
        said.append({"role": "tool", "content": _text(item.get("output"))})
        return
    if kind == "message" and role != "assistant":
        said.append({"role": role, "content": _text(item.get("content"))})
        return
    if kind not in ("message", "reasoning", "function_call"):
        raise errors.bad_request(
            f"An item of type {kind!r} is not supported; message, reasoning, "
            f"function_call and function_call_output are."
        )
    if not said or said[-1]["role"] != "assistant":
        empty = {"content": "", "reasoning_content": "", "tool_calls": []}
        said.append({"role": "assistant", **empty})
    last = said[-1]
    if kind == "message":
        last["content"] += _text(item.get("content"))
    elif kind == "reasoning":
        last["reasoning_content"] += _text(item.get("content") or item.get("summary"))
    else:
        call = {"name": item.get("name"), "arguments": item.get("arguments")}
        last["tool_calls"] = [*last["tool_calls"], call]


def _text(content: Any) -> str:
    """Returns the text of a content: a string, or a list of parts.

    Raises:
        ApiError: it is neither, or a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [
        part.get("text")
        for part in parts
        if isinstance(part, dict) and part.get("type") in _TEXTS
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise errors.bad_request(
            f"content must be a string or a list of parts of type {', '.join(_TEXTS)}."
        )
    return "".join(map(str, texts))


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool in the form of chat completions.

    Raises:
        ApiError: it is none that the client runs.
    """
    if tool.get("type") != "function":
        raise errors.bad_request(
            f"A tool of type {tool.get('type')!r} is not supported; 'function' is."
        )
    shown = ("name", "description", "parameters")
    function = {name: tool[name] for name in shown if tool.get(name) is not None}
    return {"type": "function", "function": function}
