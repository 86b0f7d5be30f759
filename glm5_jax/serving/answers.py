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
    weight_version: int | None = None,
) -> "Answers":
    """Submits requests, whose prompts another server may have to read first.

    Args:
        model: that answers.
        asked: the requests.
        turns: one for each request.
        weight_version: of the weights that draw every token; None allows any.

    Raises:
        InputError: a request is wrong.
        ApiError: the weights are of another version, or the server is shutting down.
    """
    if model.fetcher is not None:
        prompts = {id(request.prompt): request.prompt for request in asked}
        await asyncio.gather(*map(model.fetcher.fetch, prompts.values()))
    if weight_version is not None:
        await _require_version(model, weight_version)
    return Answers(model, asked, turns, weight_version)


async def _require_version(model: served.Served, wanted: int) -> None:
    """Checks the version of the weights between two dispatches.

    Raises:
        ApiError: it is another one, or the server is shutting down.
    """
    try:
        told = model.service.call(lambda engine: engine.version)
    except service_lib.ClosedError as error:
        raise errors.busy("The server is shutting down.", 503) from error
    version = await asyncio.wrap_future(told)
    if version != wanted:
        raise _other_version(f"This server's weights are of version {version}", wanted)


def _other_version(what: str, wanted: int) -> errors.ApiError:
    """Returns the answer to a request that is pinned to a version."""
    message = f"{what}, but the request wants weight_version={wanted}."
    return errors.ApiError(409, message, "weight_version")


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
        weight_version: int | None = None,
    ) -> None:
        """Submits the requests, see `begin`; a running event loop is needed.

        Raises:
            InputError: a request is wrong.
            ApiError: the server is shutting down.
        """
        loop = asyncio.get_running_loop()
        self.turns, self._weight_version = turns, weight_version
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
            ApiError: the engine failed, or the time is up, or weights of another
                version than the one that is wanted drew a token.
        """
        try:
            while self._open:
                index, event = await self._next()
                self._require_version_of(event)
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

    def require_whole(self) -> None:
        """Checks that no answer was cut off, for forms that have no word for it.

        Raises:
            ApiError: one was, by /pause?mode=abort or by the end of the server.
        """
        if any(read.reason == "abort" for read in self.turns):
            raise errors.busy("The answer was cut off; send the request again.", 503)

    def _require_version_of(self, event: service_lib.Event) -> None:
        """Checks the weights that drew tokens.

        Raises:
            ApiError: they are not of the version that is wanted.
        """
        wanted = self._weight_version
        if wanted is None or isinstance(event, service_lib.End):
            return
        if others := [version for version in event.versions if version != wanted]:
            raise _other_version(
                f"Weights of version {others[0]} came while the answer was drawn",
                wanted,
            )

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
