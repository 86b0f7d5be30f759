"""Server-sent events: an answer that arrives in pieces."""

import json
from collections.abc import AsyncIterator
from typing import Any

from absl import logging
from fastapi import responses

from glm5_jax.http_server import errors

DONE = "data: [DONE]\n\n"  # ends OpenAI's streams
_encoded = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps makes one each time


def event(data: Any, name: str | None = None) -> str:
    """Returns the text of one event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_encoded(data)}\n\n"


def response(events: AsyncIterator[str], path: str) -> responses.StreamingResponse:
    """Returns a stream of events; an error becomes its last one.

    Args:
        events: texts of `event`.
        path: of the request, which decides the form of an error.
    """

    async def guarded() -> AsyncIterator[str]:
        try:
            async for text in events:
                yield text
        except errors.ApiError as error:
            yield error_event(error, path)
        except Exception:
            logging.exception("A stream of %s failed.", path)
            yield error_event(errors.ApiError(500, "The server failed."), path)

    return responses.StreamingResponse(
        guarded(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


def error_event(error: errors.ApiError, path: str) -> str:
    """Returns the event that ends a stream after an error, in the form of its API."""
    body = error.body(path)
    return event(body, "error" if "type" in body else None)
