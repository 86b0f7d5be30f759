"""Log-probs of sampled tokens, in the forms of OpenAI."""

import itertools
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
    rows = zip(read.tokens[first:end], read.logprobs[first:end], strict=True)
    content = [
        {
            "token": (text := tokenizer.spell([id])),
            "logprob": logprob,
            "bytes": _bytes(tokenizer, id, text),
            "top_logprobs": [],
        }
        for id, logprob in rows
    ]
    return {"content": content, "refusal": None}


def completion(
    tokenizer: tokenizer_lib.Tokenizer,
    read: turn.Turn,
    first: int = 0,
    end: int | None = None,
) -> dict[str, Any]:
    """Returns the tokens first..end of an answer in the form of completions."""
    tokens = [tokenizer.spell([id]) for id in read.tokens[first:end]]
    before = len(tokenizer.spell(read.tokens[:first]))
    return {
        "tokens": tokens,
        "token_logprobs": read.logprobs[first:end],
        "top_logprobs": None,
        "text_offset": [*itertools.accumulate(map(len, tokens), initial=before)][:-1],
    }


def _bytes(tokenizer: tokenizer_lib.Tokenizer, id: int, text: str) -> list[int]:
    """Returns the bytes of a token, which may be a part of a character."""
    piece = tokenizer.pieces[id] if id < len(tokenizer.pieces) else b""
    return [*(piece or text.encode())]
