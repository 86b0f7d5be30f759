"""Answers POST /v1/completions, in OpenAI's form: continues texts or ids."""

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from glm5_jax.http_server import errors
from glm5_jax.inference import prompt_scores, requests
from glm5_jax.serving import (
    answers,
    bodies,
    logprobs,
    prompt_logprobs,
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
    echo: bool = False  # begins each answer with its prompt
    prompt_logprobs: int | None = None  # likeliest tokens beside each of a prompt
    stream_options: bodies.StreamOptions | None = None
    return_token_ids: bool = False

    @property
    def reads_prompt(self) -> bool:
        """Returns whether the answer tells something of the prompt."""
        return self.echo or self.prompt_logprobs is not None


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Prompts, and the answers that are under way; `num_choices` for each prompt.

    Attributes:
        model: that is served.
        body: of the request.
        prompts: ids.
        scores: of the prompts; empty if nobody asked.
        answers: `num_choices` for each prompt.
        offsets: of each answer's tokens.
    """

    model: served.Served
    body: CompletionBody
    prompts: list[list[int]]
    scores: list[prompt_scores.Scores]
    answers: answers.Answers
    offsets: list[logprobs.Offsets]

    @property
    def has_answers(self) -> bool:
        """Returns whether anything follows the prompts."""
        return self.body.max_tokens != 0

    def place(self, index: int) -> int:
        """Returns the place of an answer's prompt."""
        return index // self.body.num_choices


async def begin(model: served.Served, body: CompletionBody) -> Continuation:
    """Reads the prompts, scores them if asked for, and submits the requests.

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
    asked = list[requests.Request]()
    if size or not body.reads_prompt:
        for prompt in prompts:
            asked += body.requests(model, prompt, size, ends, number, constraint)
    else:  # no request has them checked
        prompt_logprobs.require_rows(model, prompts)
    scores = await _scores(model, body, prompts)
    number = len(prompts) * body.num_choices
    turns = [turn.Turn(turn.TextReader(model.text), stop) for _ in range(number)]
    under_way = await answers.begin(model, asked, turns, body.weight_version)
    echoed = [model.text.spell(ids) if body.echo else "" for ids in prompts]
    offsets = [
        logprobs.Offsets(model.text, len(text))
        for text in echoed
        for _ in range(body.num_choices)
    ]
    return Continuation(model, body, prompts, scores, under_way, offsets)


async def whole(talk: Continuation) -> dict[str, Any]:
    """Returns all answers together."""
    await talk.answers.finish()
    choices = []
    for index, read in enumerate(talk.answers.turns):
        answer = _answer(talk, index, read.content, (0, len(read.tokens)))
        reason = {"finish_reason": _reason(read)}
        choices.append(_joined(_prompt(talk, index), answer) | reason)
    return {**_head(talk.model), "choices": choices, "usage": _usage(talk)}


async def stream(talk: Continuation) -> AsyncIterator[str]:
    """Yields the events of all answers as they come, prompts before them."""
    head, turns, body = _head(talk.model), talk.answers.turns, talk.body
    for index in range(len(turns) if body.reads_prompt or body.return_token_ids else 0):
        reason = None if talk.has_answers else "length"
        choice = _prompt(talk, index) | {"finish_reason": reason}
        yield sse.event({**head, "choices": [choice]})
    async for index, delta in talk.answers.deltas():
        choice = _answer(talk, index, delta.content, (delta.first, delta.end))
        has_ended = turns[index].end is not None
        choice["finish_reason"] = turns[index].reason if has_ended else None
        yield sse.event({**head, "choices": [choice]})
    if body.stream_options and body.stream_options.include_usage:
        yield sse.event({**head, "choices": [], "usage": _usage(talk)})
    yield sse.DONE


def _prompt(talk: Continuation, index: int) -> dict[str, Any]:
    """Returns what a choice tells of its prompt."""
    body, tokenizer, place = talk.body, talk.model.text, talk.place(index)
    ids = talk.prompts[place]
    choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None}
    if body.echo:
        choice["text"] = tokenizer.spell(ids)
    if body.logprobs is not None:
        shown = logprobs.completion(tokenizer, [], [], [])
        if body.echo:
            scores = talk.scores[place]
            values = [None, *scores.logprobs]
            others = [[], *(x[: body.logprobs] for x in scores.alternatives)]
            offsets = logprobs.Offsets(tokenizer, is_spelt=True).feed(ids)
            shown = logprobs.completion(tokenizer, ids, values, others, offsets)
        choice["logprobs"] = shown
    if body.prompt_logprobs is not None:
        scores, most = talk.scores[place], body.prompt_logprobs
        choice["prompt_logprobs"] = prompt_logprobs.by_id(tokenizer, ids, scores, most)
    if body.return_token_ids:
        choice |= {"prompt_token_ids": ids, "token_ids": []}
    return choice


def _answer(
    talk: Continuation, index: int, text: str, span: tuple[int, int]
) -> dict[str, Any]:
    """Returns the next part of an answer; `span` is its tokens."""
    body, tokenizer, read = talk.body, talk.model.text, talk.answers.turns[index]
    part = slice(*span)
    choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
    if body.logprobs is not None:
        choice["logprobs"] = logprobs.completion(
            tokenizer,
            read.tokens[part],
            read.raw_logprobs[part],
            read.alternatives[part],
            talk.offsets[index].feed(read.tokens[part]),
        )
    if body.return_token_ids:
        choice["token_ids"] = read.tokens[part]
    return choice


def _joined(prompt: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Returns a whole choice."""
    choice = {**prompt, **answer, "text": prompt["text"] + answer["text"]}
    if prompt["logprobs"] is not None:
        pairs = (
            (name, prompt["logprobs"][name], answer["logprobs"][name])
            for name in prompt["logprobs"]
        )
        # Nothing is None where no likeliest tokens were asked for.
        joined = {name: [*(a or ()), *(b or ())] for name, a, b in pairs}
        choice["logprobs"] = joined | {"top_logprobs": joined["top_logprobs"] or None}
    return choice


def _reason(read: turn.Turn) -> str:
    """Returns why an answer ended; one without any token has its length."""
    return read.reason if read.stop_string or read.end else "length"


async def _scores(
    model: served.Served, body: CompletionBody, prompts: list[list[int]]
) -> list[prompt_scores.Scores]:
    """Returns the scores of the prompts; nothing if nobody asked."""
    numbers = [body.prompt_logprobs, body.logprobs if body.echo else None]
    asked = [number for number in numbers if number is not None]
    if not asked:
        return []
    found, _ = await prompt_logprobs.scored(model, prompts, max(asked))
    return found


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
    cached = sum(t.num_cached for t in talk.answers.turns[:: talk.body.num_choices])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
