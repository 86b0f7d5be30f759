"""Answers POST /v1/completions, in OpenAI's form: continues texts or ids."""

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from glm5_jax.serving import (
    answers,
    bodies,
    errors,
    logprobs,
    served,
    sse,
    structured,
    turn,
)

PATH = "/v1/completions"
_MAX_TOKENS = 16  # OpenAI's default
_MAX_PROMPTS = 256


class CompletionBody(bodies.Sampling):
    """The body of a request."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    stream_options: bodies.StreamOptions | None = None
    return_token_ids: bool = False


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Prompts, and the answers that are under way; `num_choices` for each prompt."""

    model: served.Served
    prompts: list[list[int]]
    num_choices: int
    answers: answers.Answers

    def prompt_of(self, index: int) -> list[int]:
        """Returns the prompt of an answer."""
        return self.prompts[index // self.num_choices]


async def begin(model: served.Served, body: CompletionBody) -> Continuation:
    """Reads the prompts and submits the requests.

    Raises:
        ApiError: a field cannot be used.
        InputError: a setting is wrong.
    """
    model.require_name(body.model)
    prompts = _prompts(model, body.prompt)
    size, stop = body.max_tokens, body.stop_strings
    if size is None:
        size = min(_MAX_TOKENS, *(model.room(len(prompt)) for prompt in prompts))
    ends, number = model.stop_ids, body.logprobs
    constraint = await structured.of_text(model, structured.field_of(body), ends)
    asked = [
        request
        for prompt in prompts
        for request in body.requests(model, prompt, size, ends, number, constraint)
    ]
    turns = [turn.Turn(turn.TextReader(model.text), stop) for _ in asked]
    under_way = answers.Answers(model, asked, turns)
    return Continuation(model, prompts, body.num_choices, under_way)


async def whole(talk: Continuation, body: CompletionBody) -> dict[str, Any]:
    """Returns all answers together."""
    await talk.answers.finish()
    choices = []
    for index, read in enumerate(talk.answers.turns):
        choice: dict[str, Any] = {"index": index, "text": read.content}
        choice |= {"finish_reason": read.reason, "logprobs": None}
        if body.logprobs is not None:
            choice["logprobs"] = logprobs.completion(talk.model.text, read)
        if body.return_token_ids:
            choice["prompt_token_ids"] = talk.prompt_of(index)
            choice["token_ids"] = read.tokens
        choices.append(choice)
    return {**_head(talk.model), "choices": choices, "usage": _usage(talk)}


async def stream(talk: Continuation, body: CompletionBody) -> AsyncIterator[str]:
    """Yields the events of all answers as they come."""
    head, has_begun = _head(talk.model), set()
    async for index, delta in talk.answers.deltas():
        read = talk.answers.turns[index]
        choice: dict[str, Any] = {"index": index, "text": delta.content}
        choice |= {"logprobs": None, "finish_reason": None}
        if body.logprobs is not None:
            span = delta.first, delta.end
            choice["logprobs"] = logprobs.completion(talk.model.text, read, *span)
        if body.return_token_ids:
            choice["token_ids"] = read.tokens[delta.first : delta.end]
            if index not in has_begun:
                choice["prompt_token_ids"] = talk.prompt_of(index)
            has_begun.add(index)
        if read.end is not None:
            choice["finish_reason"] = read.reason
        yield sse.event({**head, "choices": [choice]})
    if body.stream_options and body.stream_options.include_usage:
        yield sse.event({**head, "choices": [], "usage": _usage(talk)})
    yield sse.DONE


def _prompts(
    model: served.Served, given: str | list[str] | list[int] | list[list[int]]
) -> list[list[int]]:
    """Returns the ids of one prompt or of several.

    Raises:
        ApiError: there is none, or there are too many.
    """
    if isinstance(given, str):
        return [model.text.encode(given)]
    ids = [p for p in given if isinstance(p, int)]
    if ids:
        return [ids]
    if not 1 <= len(given) <= _MAX_PROMPTS:
        raise errors.bad_request(f"prompt must have 1 to {_MAX_PROMPTS} prompts.")
    texts = [p for p in given if isinstance(p, str)]
    rows = [p for p in given if isinstance(p, list)]
    return [*map(model.text.encode, texts), *rows]


def _head(model: served.Served) -> dict[str, Any]:
    id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    kind = "text_completion"
    return {"id": id, "object": kind, "created": created, "model": model.name}


def _usage(talk: Continuation) -> dict[str, Any]:
    """Returns the counts of tokens; each prompt counts once."""
    new = sum(len(read.tokens) for read in talk.answers.turns)
    prompt = sum(map(len, talk.prompts))
    cached = sum(t.num_cached for t in talk.answers.turns[:: talk.num_choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
