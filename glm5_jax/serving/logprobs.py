"""Log-probs of sampled tokens, in the forms of OpenAI and vLLM.

Texts have log-probs of the model's own distribution, at temperature 1 and without bias,
penalties and filters, so that those of other tokens compare. Token ids also have the
log-prob in the distribution that they were drawn from, which trainers need.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.serving import turn


def chat(
    tokenizer: tokenizer_lib.Tokenizer,
    read: turn.Turn,
    first: int = 0,
    end: int | None = None,
) -> dict[str, Any]:
    """Returns the tokens first..end of an answer in the form of chat completions."""

    def row(id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.spell([id])
        shown = _bytes(tokenizer, id, text)
        return {"token": text, "logprob": logprob, "bytes": shown}

    content = [
        {**row(id, logprob), "top_logprobs": [row(*other) for other in others]}
        for id, logprob, others in zip(
            read.tokens[first:end],
            read.raw_logprobs[first:end],
            read.alternatives[first:end],
            strict=True,
        )
    ]
    return {"content": content, "refusal": None}


def completion(
    tokenizer: tokenizer_lib.Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    alternatives: Sequence[Sequence[tuple[int, float]]],
    offset: int = 0,
) -> dict[str, Any]:
    """Returns tokens in the form of completions.

    Args:
        tokenizer: of the model.
        ids: of the tokens.
        logprobs: of the tokens; a prompt's first has none.
        alternatives: the likeliest tokens in their places.
        offset: characters before them.
    """
    tokens = [tokenizer.spell([id]) for id in ids]
    likeliest = []
    for others in alternatives:
        place: dict[str, float] = {}
        for id, logprob in others:  # several tokens may be spelt alike
            place.setdefault(tokenizer.spell([id]), logprob)
        likeliest.append(place or None)
    return {
        "tokens": tokens,
        "token_logprobs": [*logprobs],
        "top_logprobs": likeliest if any(likeliest) else None,
        "text_offset": [*itertools.accumulate(map(len, tokens), initial=offset)][:-1],
    }


def generation(read: turn.Turn) -> dict[str, Any]:
    """Returns all tokens of an answer, by id."""
    rows = zip(
        read.tokens, read.logprobs, read.raw_logprobs, read.alternatives, strict=True
    )
    content = [
        {
            "token": _id(id),
            "logprob": logprob,  # of the distribution that it was drawn from
            "raw_logprob": raw,  # of the model's own
            "top_logprobs": [{"token": _id(i), "logprob": x} for i, x in others],
        }
        for id, logprob, raw, others in rows
    ]
    return {"content": content}


def _id(id: int) -> str:
    return f"token_id:{id}"


def _bytes(tokenizer: tokenizer_lib.Tokenizer, id: int, text: str) -> list[int]:
    """Returns the bytes of a token, which may be a part of a character."""
    piece = tokenizer.pieces[id] if id < len(tokenizer.pieces) else b""
    return [*(piece or text.encode())]
