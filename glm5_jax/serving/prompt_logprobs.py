"""Scores the tokens of prompts, in the forms in which OpenAI and vLLM report them."""

import asyncio
from collections.abc import Sequence
from typing import Any

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.http_server import errors
from glm5_jax.inference import prompt_scores
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import served


async def scored(
    model: served.Served,
    rows: Sequence[Sequence[int]],
    num_alternatives: int | None = None,
) -> tuple[list[prompt_scores.Scores], int]:
    """Returns the scores of rows, all with the same weights, and the weights' version.

    Between two forward passes the engine decodes for others. Rows whose weights were
    replaced meanwhile are scored again.

    Args:
        model: that is served.
        rows: of ids, each at least one.
        num_alternatives: as in `prompt_scores.of`.

    Raises:
        ApiError: a row is too long, the server is shutting down, or the time is up.
        InputError: an id is none of the model's, or there are too many alternatives.
    """
    require_rows(model, rows)
    found: dict[int, prompt_scores.Scores] = {}
    versions: dict[int, int] = {}
    newest = -1
    try:
        async with asyncio.timeout(model.max_seconds):
            while missing := [i for i in range(len(rows)) if versions.get(i) != newest]:
                asked = [rows[i] for i in missing]
                for batch in prompt_scores.batches(asked, model.service.config):
                    part = [asked[i] for i in batch]
                    scores, newest = await _call(model.service, part, num_alternatives)
                    places = [missing[i] for i in batch]
                    found |= zip(places, scores, strict=True)
                    versions |= dict.fromkeys(places, newest)
    except TimeoutError:
        raise errors.ApiError(
            504, "The scores took longer than this server's time limit."
        ) from None
    except service_lib.ClosedError as error:
        raise errors.busy("The server is shutting down.", 503) from error
    return [found[i] for i in range(len(rows))], newest


def require_rows(model: served.Served, rows: Sequence[Sequence[int]]) -> None:
    """Checks that the model can read rows.

    Raises:
        ApiError: a row is empty or too long.
        InputError: an id is none of the model's.
    """
    for row in rows:
        if not row:
            raise errors.bad_request("A row must have at least one token to score.")
        if len(row) > model.service.capacity:
            raise errors.bad_request(
                f"A row has {len(row)} tokens, more than the {model.service.capacity} "
                f"of this server.",
                "context_length_exceeded",
            )
        prompt_scores.require_ids(row, model.service.config)


def by_id(
    tokenizer: tokenizer_lib.Tokenizer | None,
    row: Sequence[int],
    scores: prompt_scores.Scores,
    number: int,
) -> list[dict[str, Any] | None]:
    """Returns a prompt's log-probs in vLLM's form, the first token's being None.

    Args:
        tokenizer: None leaves texts out.
        row: ids of the prompt.
        scores: of the prompt, with alternatives.
        number: of alternatives to show.
    """

    def shown(id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.spell([id])
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    places: list[dict[str, Any] | None] = [None]
    columns = row[1:], scores.logprobs, scores.ranks, scores.alternatives
    for id, logprob, rank, others in zip(*columns, strict=True):
        place = {str(id): shown(id, logprob, rank)}
        for position, (other, value) in enumerate(others[:number], 1):
            place.setdefault(str(other), shown(other, value, position))
        places.append(place)
    return places


async def _call(
    service: service_lib.Service,
    rows: Sequence[Sequence[int]],
    num_alternatives: int | None,
) -> tuple[list[prompt_scores.Scores], int]:
    """Scores rows that share a forward pass."""
    asked = service.call(
        lambda engine: engine.everywhere(prompt_scores.of, rows, num_alternatives)
    )
    return await asyncio.wrap_future(asked)
