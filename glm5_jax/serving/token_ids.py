"""Token in, token out: POST /inference/v1/generate, /tokenize and /detokenize.

The forms are vLLM's, which trainers such as prime-rl and SkyRL speak.
"""

import base64
import uuid
from typing import Any

from glm5_jax.http_server import errors
from glm5_jax.serving import (
    answers,
    bodies,
    chat,
    logprobs,
    prompt_logprobs,
    served,
    structured,
    turn,
)

GENERATE, TOKENIZE = "/inference/v1/generate", "/tokenize"
DETOKENIZE, TOKENIZER_INFO = "/detokenize", "/tokenizer_info"


class SamplingParams(bodies.Sampling):
    """The settings of a generation."""

    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GenerateBody(bodies.Body):
    """The body of /inference/v1/generate."""

    model: str | None = None
    token_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    stream: bool = False
    return_routed_experts: bool = False


class TokenizeBody(chat.Said):
    """The body of /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_generation_prompt: bool = True


class DetokenizeBody(bodies.Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


class _NoText:
    """Reads ids without making texts of them."""

    is_thinking = False

    def feed(self, ids: Any) -> list:
        """Returns nothing."""
        return []

    def close(self) -> list:
        """Returns nothing."""
        return []


async def generate(model: served.Served, body: GenerateBody) -> dict[str, Any]:
    """Returns the sampled ids, each with its log-probs and its weights' version.

    Raises:
        ApiError: a field cannot be used.
        InputError: a setting is wrong.
    """
    model.require_name(body.model)
    if body.stream or body.sampling_params.stream:
        raise errors.bad_request(f"{GENERATE} does not stream; set stream to false.")
    settings = body.sampling_params
    if settings.stop_strings:
        raise errors.bad_request(f"{GENERATE} has no texts; use stop_token_ids.")
    if body.return_routed_experts and not model.routed_experts:
        raise errors.bad_request(
            "return_routed_experts needs a server that was started with "
            "--routed_experts."
        )
    prompt, size = body.token_ids, settings.max_tokens
    # The first log-prob that vLLM's form counts is the drawn token's own.
    others = max(settings.logprobs or 0, 1) - 1
    ends, form = model.stop_ids, structured.field_of(settings)
    constraint = await structured.of_text(model, form, ends)
    asked = settings.requests(model, prompt, size, ends, others, constraint)
    told = await _of_prompt(model, prompt, settings.prompt_logprobs)
    turns = [turn.Turn(_NoText()) for _ in asked]
    under_way = await answers.begin(model, asked, turns, settings.weight_version)
    await under_way.finish()
    choices = []
    for index, read in enumerate(under_way.turns):
        choice: dict[str, Any] = {"index": index, "token_ids": read.tokens}
        choice |= {"finish_reason": read.reason, "weight_versions": read.versions}
        if read.end is not None:  # None: the request was aborted
            choice["cache_versions"] = read.end.completion.cache_versions
        choice["logprobs"] = None
        if settings.logprobs is not None:
            choice["logprobs"] = logprobs.generation(read)
        if body.return_routed_experts:
            choice["routed_experts"] = _routed_experts(read)
        choices.append(choice)
    return {
        "request_id": f"gen-{uuid.uuid4().hex}",
        "model": model.name,
        "choices": choices,
        "prompt_logprobs": told,
        "usage": chat.usage(prompt, under_way.turns),
    }


def tokenize(model: served.Served, body: TokenizeBody) -> dict[str, Any]:
    """Returns the ids of a text or of a rendered conversation.

    A prompt that is the name of a special token, and nothing else, stands for it.

    Raises:
        ApiError: not exactly one of prompt and messages is given.
        InputError: a message is wrong.
    """
    model.require_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise errors.bad_request("Give either prompt or messages.")
    if body.prompt in model.text.special_ids:
        ids = [model.text.special_ids[body.prompt]]
    elif body.prompt is not None:
        ids = model.text.encode(body.prompt)
    else:
        ids = chat.render(model, body, body.add_generation_prompt)
    return {"tokens": ids, "count": len(ids), "max_model_len": model.service.capacity}


def tokenizer_info(model: served.Served) -> dict[str, Any]:
    """Returns the names of the tokens that clients put around texts."""
    eos = model.text.spell([model.text.eos_id])
    names = {"bos_token": None, "eos_token": eos, "pad_token": eos}
    return {"tokenizer_class": "Tokenizer", "chat_template": None} | names


def detokenize(model: served.Served, body: DetokenizeBody) -> dict[str, Any]:
    """Returns the text of ids, with special tokens spelt out."""
    model.require_name(body.model)
    return {"prompt": model.text.spell(body.tokens)}


async def _of_prompt(
    model: served.Served, prompt: list[int], number: int | None
) -> list[dict[str, Any] | None] | None:
    """Returns a prompt's log-probs, with `number` likeliest tokens in each place."""
    if number is None:
        return None
    (scores,), _ = await prompt_logprobs.scored(model, [prompt], number)
    return prompt_logprobs.by_id(model.tokenizer, prompt, scores, number)


def _routed_experts(read: turn.Turn) -> dict[str, Any] | None:
    """Returns the experts of each token but the last, which was never read.

    They are those of prompt and answer together: little-endian 16-bit numbers of shape
    [tokens, layers with experts, experts of a token].
    """
    experts = read.end.completion.experts if read.end else None
    if experts is None:  # the request was aborted
        return None
    data = base64.b64encode(experts.astype("<u2").tobytes()).decode()
    return {"data": data, "shape": [*experts.shape], "dtype": "uint16"}
