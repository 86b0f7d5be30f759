"""Answers POST /v1/chat/completions, in OpenAI's form.

Beside OpenAI's fields there are reasoning_content and vLLM's top_k, min_p,
stop_token_ids, chat_template_kwargs and return_token_ids.
"""

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from glm5_jax import messages as messages_lib
from glm5_jax.data.chat import templates
from glm5_jax.http_server import errors
from glm5_jax.serving import answers, bodies, logprobs, served, sse, structured, turn

PATH = "/v1/chat/completions"
_EFFORTS = {"low": "high", "medium": "high", "high": "high", "xhigh": "max"}
_EFFORTS |= {"minimal": "high", "max": "max"}


class Said(bodies.Body):
    """The fields of a body that decide about the prompt."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Whether calls follow the tools' schemas; None: if a tool says so.
    strict_tools: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None  # {"type": "enabled" or "disabled"}
    reasoning_effort: str | None = None

    @property
    def used_tools(self) -> Sequence[Mapping[str, Any]]:
        """Returns the tools that the model is shown.

        Raises:
            InputError: a tool is malformed.
        """
        if self.tool_choice == "none":
            return ()
        messages_lib.tool_names(self.tools or ())
        return self.tools or ()

    @property
    def calls(self) -> structured.Calls:
        """Returns the calls that the model may make.

        Raises:
            ApiError: tool_choice has another form.
            InputError: a tool is malformed.
        """
        tools, is_strict = self.used_tools, self.strict_tools
        if is_strict is None:
            is_strict = any(t.get("function", t).get("strict") is True for t in tools)
        choice = structured.forced(self.tool_choice, self.parallel_tool_calls)
        is_parallel = self.parallel_tool_calls is not False
        return structured.Calls(tools, choice, is_strict, is_parallel)

    def template(self, model: served.Served) -> templates.Template:
        """Returns the chat template with the thinking that is asked for.

        Raises:
            ApiError: a switch has an unknown value.
        """
        switches: dict[str, Any] = {}
        if (effort := self.reasoning_effort) is not None:
            if effort != "none" and effort not in _EFFORTS:
                raise errors.bad_request(
                    f"reasoning_effort must be one of none, {', '.join(_EFFORTS)}; got "
                    f"{effort!r}."
                )
            switches["enable_thinking"] = effort != "none"
            switches["reasoning_effort"] = _EFFORTS.get(effort, "max")
        if self.thinking is not None:
            switches["enable_thinking"] = self.thinking.get("type") != "disabled"
        given = self.chat_template_kwargs or {}
        for name in ("enable_thinking", "clear_thinking"):
            if given.get(name) is None:
                continue
            if not isinstance(given[name], bool):
                raise errors.bad_request(
                    f"chat_template_kwargs.{name} must be true or false, got "
                    f"{given[name]!r}."
                )
            switches[name] = given[name]
        return dataclasses.replace(model.chat, **switches)


class ChatBody(bodies.Sampling, Said):
    """The body of a request."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: bodies.StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool = False


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A rendered conversation, and the answers to it that are under way."""

    model: served.Served
    prompt: list[int]
    answers: answers.Answers


async def begin(model: served.Served, body: ChatBody) -> Conversation:
    """Renders a conversation and submits its requests.

    Raises:
        ApiError: a field cannot be used.
        InputError: a message or a setting is wrong.
    """
    model.require_name(body.model)
    if body.top_logprobs and not body.logprobs:
        raise errors.bad_request("top_logprobs needs logprobs to be true.")
    form = structured.field_of(body)
    template, calls = body.template(model), body.calls
    prompt = render(model, body)
    size = body.max_completion_tokens
    size = body.max_tokens if size is None else size
    ends = model.stop_ids | template.stop_ids
    constraint = await structured.of_chat(model, form, calls, prompt, ends)
    asked = body.requests(model, prompt, size, ends, body.top_logprobs, constraint)
    stop = body.stop_strings
    turns = [turn.chat(template, prompt, calls.tools, stop) for _ in asked]
    under_way = await answers.begin(model, asked, turns, body.weight_version)
    return Conversation(model, prompt, under_way)


def render(
    model: served.Served, body: Said, add_generation_prompt: bool = True
) -> list[int]:
    """Returns the ids of a conversation.

    Raises:
        ApiError: there are no messages, or a field cannot be used.
        InputError: a message is wrong.
    """
    if not body.messages:
        raise errors.bad_request("messages must have at least one message.")
    said = [
        {**m, "role": "system"} if m.get("role") == "developer" else m
        for m in body.messages
    ]
    rendered = body.template(model).render(said, body.used_tools, add_generation_prompt)
    return rendered.tokens


def usage(prompt: Sequence[int], turns: Sequence[turn.Turn]) -> dict[str, Any]:
    """Returns the counts of tokens."""
    new = sum(len(t.tokens) for t in turns)
    thought = sum(t.num_reasoning for t in turns)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": new,
        "total_tokens": len(prompt) + new,
        "prompt_tokens_details": {"cached_tokens": turns[0].num_cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


async def whole(talk: Conversation, body: ChatBody) -> dict[str, Any]:
    """Returns all answers together."""
    await talk.answers.finish()
    turns = talk.answers.turns
    choices = []
    for index, read in enumerate(turns):
        content = None if read.calls and not read.content else read.content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = [_call(call) for call in read.calls]
        choice: dict[str, Any] = {"index": index, "message": message}
        choice |= {"finish_reason": _reason(read), "logprobs": None}
        if body.logprobs:
            choice["logprobs"] = logprobs.chat(talk.model.text, read)
        if body.return_token_ids:
            choice["token_ids"] = read.tokens
        choices.append(choice)
    found = {**_head(talk.model, "chat.completion"), "choices": choices}
    if body.return_token_ids:
        found["prompt_token_ids"] = talk.prompt
    return found | {"usage": usage(talk.prompt, turns)}


async def stream(talk: Conversation, body: ChatBody) -> AsyncIterator[str]:
    """Yields the events of all answers as they come."""
    head = _head(talk.model, "chat.completion.chunk")
    turns = talk.answers.turns

    def chunk(index: int, delta: dict, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None}
        choice |= {"finish_reason": None, **more}
        return sse.event({**head, "choices": [choice]})

    for index in range(len(turns)):
        yield chunk(index, {"role": "assistant", "content": ""})
    if body.return_token_ids:
        yield sse.event({**head, "choices": [], "prompt_token_ids": talk.prompt})
    async for index, delta in talk.answers.deltas():
        read, more = turns[index], {}
        if body.logprobs and delta.end > delta.first:
            span = delta.first, delta.end
            more["logprobs"] = logprobs.chat(talk.model.text, read, *span)
        if body.return_token_ids:
            more["token_ids"] = read.tokens[delta.first : delta.end]
        texts = {"reasoning_content": delta.reasoning, "content": delta.content}
        texts = {name: text for name, text in texts.items() if text}
        if texts or any(more.values()):
            yield chunk(index, texts, **more)
        first = len(read.calls) - len(delta.calls)
        for number, call in enumerate(delta.calls, first):
            yield chunk(index, {"tool_calls": [_call(call, number)]})
            rest = {"index": number, "function": {"arguments": call.arguments}}
            yield chunk(index, {"tool_calls": [rest]})
        if read.end is not None:
            yield chunk(index, {}, finish_reason=_reason(read))
    if body.stream_options and body.stream_options.include_usage:
        yield sse.event({**head, "choices": [], "usage": usage(talk.prompt, turns)})
    yield sse.DONE


def _head(model: served.Served, kind: str) -> dict[str, Any]:
    id = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model.name}


def _call(call: turn.Call, index: int | None = None) -> dict[str, Any]:
    """Returns a call; in a stream, with its index and without its arguments."""
    is_whole = index is None
    function = {"name": call.name, "arguments": call.arguments if is_whole else ""}
    found = {"id": call.id, "type": "function", "function": function}
    return found if is_whole else {"index": index, **found}


def _reason(read: turn.Turn) -> str:
    is_call = bool(read.calls) and read.reason == "stop"
    return "tool_calls" if is_call else read.reason
