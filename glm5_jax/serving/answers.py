"""Asks the engine's service for the answers to one prompt, and reads them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from glm5_jax.http_server import errors
from glm5_jax.inference import requests
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import served, turn

_Letter = tuple[int, service_lib.Event] | None  # None: the time is up


async def begin(
    model: served.Served,
    asked: Sequence[requests.Request],
    turns: Sequence[turn.Turn],
) -> "Answers":
    """Submits requests, whose prompts another server may have to read first.

    Raises:
        InputError: a request is wrong.
        ApiError: the server is shutting down.
    """
    if model.fetcher is not None:
        prompts = {id(request.prompt): request.prompt for request in asked}
        await asyncio.gather(*map(model.fetcher.fetch, prompts.values()))
    return Answers(model, asked, turns)


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
        self._open: set[int] = set()
        self._events: asyncio.Queue[_Letter] = asyncio.Queue()
        self._clock = loop.call_later(model.max_seconds, self._events.put_nowait, None)
        send = model.letters.send
        try:
            for index, request in enumerate(asked):
                model.service.submit(request, _listener(send, self._events, index))
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
        letter = await self._events.get()
        if letter is None:
            raise errors.ApiError(
                504, "The answer took longer than this server's time limit."
            )
        return letter

    def _abort(self) -> None:
        self._clock.cancel()
        for index in self._open:
            self._service.abort(self._asked[index].id)
        self._open = set()


def _listener(
    send: Callable[[asyncio.Queue[_Letter], _Letter], None],
    events: asyncio.Queue[_Letter],
    index: int,
) -> Callable[[service_lib.Event], None]:
    """Returns what passes a request's events from the engine's thread to the loop."""
    return lambda event: send(events, (index, event))
