"""Log-probs of sampled tokens, in the forms of OpenAI and vLLM.

Texts have log-probs of the model's own distribution, at temperature 1 and without bias,
penalties and filters, so that those of other tokens compare. Token ids also have the
log-prob in the distribution that they were drawn from, which trainers need.
"""

from collections.abc import Sequence
from typing import Any

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import text_stream
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


class Offsets:
    """Counts the characters before each token of a text that arrives in pieces.

    All tokens that a character is split into have the place of that character.
    """

    def __init__(
        self,
        tokenizer: tokenizer_lib.Tokenizer,
        offset: int = 0,
        *,
        is_spelt: bool = False,
    ) -> None:
        """Starts after `offset` characters; see `TextStream` for the others."""
        self._text = text_stream.TextStream(tokenizer, is_spelt=is_spelt)
        self._offset = offset

    def feed(self, ids: Sequence[int]) -> list[int]:
        """Returns the offsets of more tokens."""
        found = []
        for id in ids:
            found.append(self._offset)
            self._offset += len(self._text.feed(id))
        return found


def completion(
    tokenizer: tokenizer_lib.Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    alternatives: Sequence[Sequence[tuple[int, float]]],
    offsets: Sequence[int] = (),
) -> dict[str, Any]:
    """Returns tokens in the form of completions.

    Args:
        tokenizer: of the model.
        ids: of the tokens.
        logprobs: of the tokens; a prompt's first has none.
        alternatives: the likeliest tokens in their places.
        offsets: of the tokens, see `Offsets`.
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
        "text_offset": [*offsets],
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
