"""Asks the engine's service for the answers to one prompt, and reads them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from glm5_jax.inference import requests
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import errors, served, turn

_Queue = asyncio.Queue[tuple[int, service_lib.Event]]


class Answers:
    """Requests under way, each with the turn that reads its events.

    Requests that have not ended are aborted when `deltas` is closed, which also happens
    when its task is cancelled, or when the object is not used any more.

    Attributes:
        turns: one for each request.
    """

    def __init__(
        self,
        model: served.Served,
        asked: Sequence[requests.Request],
        turns: Sequence[turn.Turn],
    ) -> None:
        """Submits the requests; a running event loop is needed.

        Raises:
            InputError: a request is wrong.
            ApiError: the server is shutting down.
        """
        loop = asyncio.get_running_loop()
        self.turns = turns
        self._service, self._asked = model.service, asked
        self._deadline = loop.time() + model.max_seconds
        self._open: set[int] = set()
        self._events: _Queue = asyncio.Queue()
        try:
            for index, request in enumerate(asked):
                model.service.submit(request, _listener(loop, self._events, index))
                self._open.add(index)
        except service_lib.ClosedError as error:
            raise errors.busy("The server is shutting down.", 503) from error

    def __del__(self) -> None:
        """Aborts the requests of a stream that never began."""
        self._abort()

    async def deltas(self) -> AsyncIterator[tuple[int, turn.Delta]]:
        """Yields (index of the request, what is new), until all have ended.

        The last one of each request comes after its turn's `end`.

        Raises:
            ApiError: the engine failed, or the time is up.
        """
        try:
            while self._open:
                index, event = await self._next()
                read = self.turns[index]
                had_stopped = read.stop_string is not None
                delta = read.feed(event)
                if isinstance(event, service_lib.End):
                    self._open.discard(index)
                    if event.reason == "error":
                        raise errors.ApiError(
                            500, f"The engine failed: {event.message}"
                        )
                elif read.stop_string is not None and not had_stopped:
                    self._service.abort(self._asked[index].id)
                yield index, delta
        finally:
            self._abort()

    async def finish(self) -> None:
        """Waits for all answers."""
        async for _ in self.deltas():
            pass

    async def _next(self) -> tuple[int, service_lib.Event]:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._events.get()
        except TimeoutError:
            raise errors.ApiError(
                504, "The answer took longer than this server's time limit."
            ) from None

    def _abort(self) -> None:
        for index in self._open:
            self._service.abort(self._asked[index].id)
        self._open = set()


def _listener(
    loop: asyncio.AbstractEventLoop, events: _Queue, index: int
) -> Callable[[service_lib.Event], None]:
    """Returns what passes a request's events from the engine's thread to the loop."""

    def hear(event: service_lib.Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, (index, event))

    return hear
