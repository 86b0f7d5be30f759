"""OpenAI's and Anthropic's addresses for agents: every episode has its own.

    http://127.0.0.1:PORT/TOKEN/v1/chat/completions
    http://127.0.0.1:PORT/TOKEN/v1/messages

Any program that takes a base URL can thus be trained unchanged. Nothing here imports
jax.
"""

import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web

from glm5_jax import anthropic_form, config
from glm5_jax import messages as messages_lib
from glm5_jax.inference import requests
from glm5_jax.rl import agent_session, anthropic_answers, calls, completer

MODEL = "policy"  # name that agents see; they may send any
_MAX_BODY = 2**24


class Doors:
    """The addresses of the agents that play now.

    Attributes:
      port: of this machine, where they are served.
    """

    def __init__(self) -> None:
        """Begins without agents; `serving` tells the port."""
        self.port: int
        self._sessions: dict[str, agent_session.AgentSession] = {}

    @contextlib.asynccontextmanager
    async def opened(self, session: agent_session.AgentSession) -> AsyncIterator[str]:
        """Yields the base URL of a session, which ends with the block."""
        token = secrets.token_urlsafe(16)
        self._sessions[token] = session
        try:
            yield f"http://127.0.0.1:{self.port}/{token}/v1"
        finally:
            del self._sessions[token]
            await calls.finished(session.end())

    def app(self) -> web.Application:
        """Returns the routes."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post("/{token}/v1/chat/completions", self._complete)
        app.router.add_post("/{token}" + anthropic_form.PATH, self._complete)
        app.router.add_get("/{token}/v1/models", self._models)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        listed = {"id": MODEL, "object": "model", "created": 0, "owned_by": "glm5_jax"}
        return web.json_response({"object": "list", "data": [listed]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.get(request.match_info["token"])
        if session is None:
            return _error(404, "The episode of this address is over.")
        is_anthropic = request.path.endswith(anthropic_form.PATH)
        try:
            body = await request.json()
            messages, tools = _objects(body["messages"]), body.get("tools") or []
            if is_anthropic:
                messages = anthropic_form.messages_of(messages, body.get("system"))
                tools = [*map(anthropic_form.tool, tools)]
            message, completion = await session.answer(messages, tools)
        except agent_session.OverError as error:
            return _error(400, str(error), "episode_over")
        except (config.InputError, KeyError, TypeError, ValueError) as error:
            return _error(400, f"The request cannot be used: {error}")
        except completer.EngineError as error:
            return _error(503, str(error))
        if is_anthropic:
            answer = anthropic_answers.whole(message, completion, MODEL)
            events = anthropic_answers.events(answer)
        else:
            answer = _answer(message, completion, session.num_turns)
            events = _events(answer)
        if body.get("stream"):
            return await _streamed(request, events)
        return web.json_response(answer)


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Doors]:
    """Yields doors that are served at a free port of this machine."""
    made = Doors()
    runner = web.AppRunner(made.app(), shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.port = runner.addresses[0][1]
        yield made
    finally:
        await runner.cleanup()


def _objects(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages of a request.

    Raises:
      InputError: they are no list of objects.
    """
    if not isinstance(messages, list):
        raise config.InputError(f"messages must be a list, got {messages!r}.")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise config.InputError(
                f"messages[{i}] must be an object, got {message!r}."
            )
    return messages


def _answer(
    message: dict[str, Any], completion: requests.Completion, turn: int
) -> dict[str, Any]:
    """Returns a turn in OpenAI's form."""
    made = [
        {
            "id": f"call_{turn}_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(
            map(messages_lib.call_of, messages_lib.calls_in(message))
        )
    ]
    content = messages_lib.text_of(message, "content")
    told: dict[str, Any] = {"role": "assistant", "content": content}
    if made:
        told |= {"content": content or None, "tool_calls": made}
    if message.get("reasoning_content"):
        told["reasoning_content"] = message["reasoning_content"]
    is_cut = completion.finish_reason == "length"
    reason = "length" if is_cut else "tool_calls" if made else "stop"
    choice = {"index": 0, "message": told, "finish_reason": reason, "logprobs": None}
    number = len(completion.tokens)
    usage = {"prompt_tokens": 0, "completion_tokens": number, "total_tokens": number}
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion"}
    head |= {"created": int(time.time()), "model": MODEL}
    return {**head, "choices": [choice], "usage": usage}


def _events(answer: dict[str, Any]) -> Iterator[str]:
    """Yields the events of a whole answer in OpenAI's form."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    made = delta.get("tool_calls", [])
    if made:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(made)]
    head = {**answer, "object": "chat.completion.chunk"}
    del head["usage"]
    for changes in (
        {"delta": delta, "finish_reason": None},
        {"delta": {}, "finish_reason": choice["finish_reason"]},
    ):
        event = {**head, "choices": [{"index": 0, "logprobs": None, **changes}]}
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"


async def _streamed(request: web.Request, events: Iterator[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(event.encode())
    await response.write_eof()
    return response


def _error(
    status: int, message: str, kind: str = "invalid_request_error"
) -> web.Response:
    told = {"message": message, "type": kind, "param": None, "code": None}
    return web.json_response({"error": told}, status=status)
