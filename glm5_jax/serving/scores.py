"""Answers POST /score: log-probs of given tokens in the model's own distribution."""

from typing import Any

from glm5_jax.http_server import errors
from glm5_jax.serving import bodies, prompt_logprobs, served

PATH = "/score"
_MAX_ROWS = 256


class ScoreBody(bodies.Body):
    """The body of a request: texts, or ids."""

    model: str | None = None
    texts: str | list[str] | None = None
    token_ids: list[int] | list[list[int]] | None = None


async def score(model: served.Served, body: ScoreBody) -> dict[str, Any]:
    """Returns the log-prob of each token after those before it; the first has none.

    Raises:
        ApiError: there is nothing to score, or too much.
        InputError: an id is none of the model's.
    """
    model.require_name(body.model)
    rows = _rows(model, body)
    found, version = await prompt_logprobs.scored(model, rows)
    data = [
        {"index": i, "token_ids": row, "logprobs": [None, *scores.logprobs]}
        for i, (row, scores) in enumerate(zip(rows, found, strict=True))
    ]
    number = sum(map(len, rows))
    usage = {"prompt_tokens": number, "completion_tokens": 0, "total_tokens": number}
    return {
        "object": "list",
        "model": model.name,
        "weight_version": version,
        "data": data,
        "usage": usage,
    }


def _rows(model: served.Served, body: ScoreBody) -> list[list[int]]:
    """Returns the rows of ids.

    Raises:
        ApiError: not exactly one field is given, or it has no rows or too many.
    """
    if (body.texts is None) == (body.token_ids is None):
        raise errors.bad_request("Give either texts or token_ids.")
    if body.texts is not None:
        texts = [body.texts] if isinstance(body.texts, str) else body.texts
        rows = [model.text.encode(text) for text in texts]
    else:
        given = body.token_ids or []
        ids = [id for id in given if isinstance(id, int)]
        rows = [ids] if ids else [row for row in given if isinstance(row, list)]
    if not 1 <= len(rows) <= _MAX_ROWS or not all(rows):
        raise errors.bad_request(
            f"There must be 1 to {_MAX_ROWS} rows, each with at least one token."
        )
    return rows
