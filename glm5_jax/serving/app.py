"""Joins the routes of the server."""

import asyncio
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import fastapi
import pydantic
from fastapi import exceptions, responses
from starlette import exceptions as starlette_exceptions

import glm5_jax
from glm5_jax import anthropic_form, config
from glm5_jax.http_server import errors, guard
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import (
    anthropic_messages,
    chat,
    completions,
    fetching,
    liveness,
    metrics,
    openai_responses,
    prefill,
    scores,
    served,
    sse,
    token_ids,
    weight_updates,
)

_PAGE = pathlib.Path(__file__).parent / "page.html"
_MAX_SHOWN = 5  # wrong fields in one message
_TYPE = re.compile(r"\[|^(str|int|dict)$")


def make(model: served.Served, limits: guard.Limits) -> guard.Guard:
    """Returns the ASGI application."""
    app = fastapi.FastAPI(title="glm5_jax", version=glm5_jax.__version__)
    door, prefills = guard.Guard(app, limits), prefill.Prefills(model)
    _handle_errors(app)
    _add_status(app, model, door, prefills)
    _add_texts(app, model)
    _add_token_ids(app, model)
    _add_engine(app, model, prefills)
    _add_weight_updates(app, model)
    return door


def _add_status(
    app: fastapi.FastAPI,
    model: served.Served,
    door: guard.Guard,
    prefills: prefill.Prefills,
) -> None:
    """Adds the routes that tell about the server."""
    alive = liveness.Liveness(model)

    @app.get("/health")
    async def health() -> dict[str, str]:
        alive.require()
        return {"status": "ok"}

    @app.get("/metrics", response_class=responses.PlainTextResponse)
    async def figures() -> str:
        return metrics.render(model, door, prefills)

    @app.get("/", response_class=responses.HTMLResponse)
    async def page() -> str:
        return _PAGE.read_text(encoding="utf-8")

    def described() -> dict[str, Any]:
        kind = {"object": "model", "owned_by": "glm5_jax"}
        size = model.service.capacity
        return {
            "id": model.name,
            "created": model.created,
            "max_model_len": size,
            "weight_version": model.service.stats().version,
        } | kind

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        model.require_name(name)
        return described()


def _add_texts(app: fastapi.FastAPI, model: served.Served) -> None:
    """Adds the routes that answer with texts."""

    @app.post(chat.PATH, response_model=None)
    async def chat_completions(body: chat.ChatBody) -> responses.Response | dict:
        talk = await chat.begin(model, body)
        if body.stream:
            return sse.response(chat.stream(talk, body), chat.PATH)
        return await chat.whole(talk, body)

    @app.post(completions.PATH, response_model=None)
    async def text_completions(
        body: completions.CompletionBody,
    ) -> responses.Response | dict:
        talk = await completions.begin(model, body)
        if body.stream:
            return sse.response(completions.stream(talk), completions.PATH)
        return await completions.whole(talk)

    @app.post(openai_responses.PATH, response_model=None)
    async def respond(
        body: openai_responses.ResponsesBody,
    ) -> responses.Response | dict:
        talk = await openai_responses.begin(model, body)
        if body.stream:
            events = openai_responses.stream(talk, body)
            return sse.response(events, openai_responses.PATH)
        return await openai_responses.whole(talk, body)

    @app.post(anthropic_form.PATH, response_model=None)
    async def messages(
        body: anthropic_messages.MessagesBody,
    ) -> responses.Response | dict:
        talk = await chat.begin(model, body.as_chat(model))
        if body.stream:
            events = anthropic_messages.stream(talk)
            return sse.response(events, anthropic_form.PATH)
        return await anthropic_messages.whole(talk)

    @app.post(anthropic_messages.COUNT)
    async def count(body: anthropic_messages.MessagesBody) -> dict[str, int]:
        return anthropic_messages.count(model, body)


def _add_engine(
    app: fastapi.FastAPI, model: served.Served, prefills: prefill.Prefills
) -> None:
    """Adds the routes that use the engine, or stop and start it in vLLM's words."""

    @app.post(fetching.PATH, response_model=None)
    async def read(body: prefill.PrefillBody) -> responses.Response:
        return await prefills.answer(body)

    @app.post("/pause")
    async def pause(
        mode: service_lib.Pause = "keep", clear_cache: bool = False
    ) -> dict:
        await asyncio.wrap_future(model.service.pause(mode))
        if clear_cache:
            await asyncio.wrap_future(model.service.clear_cache())
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict:
        await asyncio.wrap_future(model.service.resume())
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict:
        return {"is_paused": model.service.stats().is_paused}


def _add_weight_updates(app: fastapi.FastAPI, model: served.Served) -> None:
    """Adds the routes that replace the weights."""
    updates = weight_updates.Updates(model)

    @app.post(weight_updates.START)
    async def start() -> dict[str, Any]:
        return updates.start()

    @app.post(weight_updates.UPDATE)
    async def update(body: weight_updates.UpdateBody) -> dict[str, Any]:
        return await updates.update(body)

    @app.post(weight_updates.FINISH)
    async def finish(body: weight_updates.FinishBody) -> dict[str, Any]:
        return await updates.finish(body)


def _add_token_ids(app: fastapi.FastAPI, model: served.Served) -> None:
    """Adds the routes that take or return token ids."""

    @app.post(token_ids.GENERATE)
    async def generate(body: token_ids.GenerateBody) -> dict[str, Any]:
        return await token_ids.generate(model, body)

    @app.post(scores.PATH)
    async def score(body: scores.ScoreBody) -> dict[str, Any]:
        return await scores.score(model, body)

    @app.post(token_ids.TOKENIZE)
    async def tokenize(body: token_ids.TokenizeBody) -> dict[str, Any]:
        return token_ids.tokenize(model, body)

    @app.get(token_ids.TOKENIZER_INFO)
    async def tokenizer_info() -> dict[str, Any]:
        return token_ids.tokenizer_info(model)

    @app.post(token_ids.DETOKENIZE)
    async def detokenize(body: token_ids.DetokenizeBody) -> dict[str, Any]:
        return token_ids.detokenize(model, body)


def _handle_errors(app: fastapi.FastAPI) -> None:
    """Answers every error with one message in the form of the client's API."""

    def answer(
        request: fastapi.Request, error: errors.ApiError
    ) -> responses.JSONResponse:
        body = error.body(request.url.path)
        headers = dict(error.headers)
        return responses.JSONResponse(body, status_code=error.status, headers=headers)

    @app.exception_handler(errors.ApiError)
    async def on_api_error(
        request: fastapi.Request, error: errors.ApiError
    ) -> responses.Response:
        return answer(request, error)

    @app.exception_handler(config.InputError)
    async def on_input_error(
        request: fastapi.Request, error: config.InputError
    ) -> responses.Response:
        return answer(request, errors.bad_request(str(error)))

    @app.exception_handler(exceptions.RequestValidationError)
    async def on_wrong_types(
        request: fastapi.Request, error: exceptions.RequestValidationError
    ) -> responses.Response:
        return answer(request, errors.bad_request(_explained(error.errors(), 1)))

    @app.exception_handler(pydantic.ValidationError)
    async def on_wrong_form(
        request: fastapi.Request, error: pydantic.ValidationError
    ) -> responses.Response:
        # Another API's body that makes no chat completion.
        return answer(request, errors.bad_request(_explained(error.errors())))

    @app.exception_handler(starlette_exceptions.HTTPException)
    async def on_http_error(
        request: fastapi.Request, error: starlette_exceptions.HTTPException
    ) -> responses.Response:
        shown = f"{request.method} {request.url.path}: {error.detail}."
        headers = dict(error.headers or {})
        return answer(request, errors.ApiError(error.status_code, shown, None, headers))

    @app.exception_handler(Exception)
    async def on_failure(
        request: fastapi.Request, error: Exception
    ) -> responses.Response:
        return answer(request, errors.ApiError(500, "The server failed."))


def _explained(found_errors: Sequence[Any], num_outer: int = 0) -> str:
    """Returns what is wrong with a body, one line a field.

    Args:
        found_errors: of pydantic.
        num_outer: names around a field's own, which are dropped.
    """
    lines = []
    for found in found_errors[:_MAX_SHOWN]:
        if found["type"] == "json_invalid":
            return f"The body is not JSON: {found['ctx']['error']}."
        # A union adds the names of its types.
        names = [str(x) for x in found["loc"][num_outer:] if not _TYPE.search(str(x))]
        lines.append(f"{'.'.join(names) or 'The body'}: {found['msg']}.")
    return "\n".join(dict.fromkeys(lines))
