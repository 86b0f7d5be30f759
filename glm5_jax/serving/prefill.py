"""Answers POST /prefill: reads a prompt for another server, and sends it the pages.

    POST /prefill {"token_ids": [...], "first_page": 3, "weight_version": 7}

The answer is the whole pages of the prompt from `first_page` on (page_bytes.py). They
are copied to host memory before the next dispatch, and belong to the answer: nothing of
it is left when it has been taken, its time is over, or its client leaves.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent import futures

from fastapi import responses

from glm5_jax.http_server import errors
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import events, handover, requests
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import bodies, page_bytes, served

MAX_HELD_BYTES = 4 * 2**30  # of answers that are not taken yet
TAKE_SECONDS = 60.0  # for an answer to be taken
_PART = 2**20  # bytes


class PrefillBody(bodies.Body):
    """The body of a request."""

    model: str | None = None
    token_ids: list[int]
    first_page: int = 0
    weight_version: int | None = None


class Prefills:
    """Prompts that are read for other servers.

    Attributes:
        num_pages: that were sent.
        num_bytes: that were sent.
        num_held: bytes of answers that are not taken yet.
    """

    def __init__(self, model: served.Served) -> None:
        """Reads nothing yet."""
        self._model = model
        self._form: handover.Form | None = None
        self.num_pages = self.num_bytes = self.num_held = 0

    async def answer(self, body: PrefillBody) -> responses.StreamingResponse:
        """Reads a prompt and returns the bytes of its pages.

        Raises:
            ApiError: the server cannot hand over pages, or is busy, or its weights have
                another version.
            InputError: the prompt is wrong.
        """
        model = self._model
        model.require_name(body.model)
        model.room(len(body.token_ids))
        if body.first_page < 0:
            raise errors.bad_request("first_page must not be negative.")
        if self.num_held > MAX_HELD_BYTES:
            raise errors.busy("Too many pages wait to be taken; try again later.")
        _require_version(body, model.service.stats().version)
        try:
            async with asyncio.timeout(model.max_seconds):
                form = await self._known_form()
                pages = await self._read(body)
        except TimeoutError:
            raise errors.ApiError(504, "Reading the prompt took too long.") from None
        _require_version(body, pages.version)  # they may be new meanwhile
        parts = await asyncio.to_thread(page_bytes.encoded, pages, form, body.token_ids)
        size = sum(map(len, parts))
        self.num_pages += pages.number
        return responses.StreamingResponse(
            self._sent(parts, size),
            media_type="application/octet-stream",
            headers={"Content-Length": str(size)},
        )

    async def _known_form(self) -> handover.Form:
        """Returns the form of the engine's pages, for which it is asked once.

        Raises:
            InputError: it has none that can be handed over.
        """
        if self._form is None:
            asked = self._model.service.call(lambda engine: engine.view().form)
            self._form = await asyncio.wrap_future(asked)
        return self._form

    async def _read(self, body: PrefillBody) -> handover.Pages:
        """Reads a prompt and copies its pages."""
        service = self._model.service
        asked = requests.Request(service.new_id(), body.token_ids, 1, temperature=0.0)
        copied: futures.Future[handover.Pages] = futures.Future()
        copied.set_running_or_notify_cancel()  # nobody can cancel it

        def copy(engine: engine_lib.Engine) -> handover.Pages:
            return handover.copy(engine.view(), body.token_ids, body.first_page)

        def hear(event: events.Event) -> None:
            """Copies before the next dispatch: commands come first."""
            if not isinstance(event, events.End):
                return
            try:
                if event.reason in ("abort", "error"):
                    raise errors.ApiError(503, f"The prompt was not read: {event!r}")
                service.call(copy).add_done_callback(lambda f: _pass_on(f, copied))
            except Exception as error:
                copied.set_exception(error)

        try:
            service.submit(asked, hear)
        except service_lib.ClosedError as error:
            raise errors.busy("The server is shutting down.", 503) from error
        try:
            return await asyncio.wrap_future(copied)
        finally:
            service.abort(asked.id)

    async def _sent(
        self, parts: Sequence[memoryview], size: int
    ) -> AsyncIterator[bytes]:
        """Yields the bytes of an answer.

        Raises:
            TimeoutError: the client takes too long.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TAKE_SECONDS
        self.num_held += size
        try:
            for part in parts:
                for start in range(0, len(part), _PART):
                    if loop.time() > deadline:
                        raise TimeoutError("The pages were not taken in time.")
                    yield bytes(part[start : start + _PART])
            self.num_bytes += size
        finally:
            self.num_held -= size


def _require_version(body: PrefillBody, version: int) -> None:
    """Checks the version of the weights.

    Raises:
        ApiError: it is not the one that the other server has.
    """
    if body.weight_version not in (None, version):
        raise errors.ApiError(409, f"The weights have version {version} here.")


def _pass_on(source: futures.Future, target: futures.Future) -> None:
    """Gives a future the result of another one."""
    error = source.exception()
    if error is None:
        target.set_result(source.result())
    else:
        target.set_exception(error)
