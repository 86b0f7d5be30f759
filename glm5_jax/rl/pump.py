"""Lets the coroutines of one thread use an engine that runs in another one.

The engine waits for coroutines whose requests have just finished, so that equal runs
have equal dispatches.
"""

import asyncio
import collections
import functools
import threading
from typing import Any, TypeVar

from glm5_jax.inference import events, requests
from glm5_jax.inference import service as service_lib
from glm5_jax.rl import completer

# Rounds of the event loop in which finished episodes can submit their next request
# before the next dispatch. From the end of an episode to the first prompt of the next
# takes 10 rounds of 2 us.
_NUM_ROUNDS = 16
_HOLD_SECONDS = 10.0  # that the engine waits for an event loop that does not turn

T = TypeVar("T")


class Pump:
    """Completes the requests of coroutines of one event loop."""

    def __init__(self, service: service_lib.Service) -> None:
        """Serves requests to an engine that other clients may use, too."""
        self.capacity = service.capacity  # tokens of a sequence
        self._service = service
        self._num_waiting = 0  # coroutines
        self._is_held = False  # the engine is about to wait for the coroutines
        self._is_closed = False  # it waits no more
        self._is_over = threading.Event()  # what it waits for
        # Answers that are not yet given.
        self._ended: collections.deque[tuple[asyncio.Future, events.End]]
        self._ended = collections.deque()

    async def complete(self, request: requests.Request) -> requests.Completion:
        """Returns the engine's completion of a request; aborts it if cancelled.

        Raises:
          InputError: the engine refuses the request.
          EngineError: the engine fails for the request.
        """
        answer: asyncio.Future[events.End]
        answer = asyncio.get_running_loop().create_future()
        if not self._num_waiting:
            self._hold(answer)  # other coroutines are about to submit, too
        self._num_waiting += 1
        try:
            self._service.submit(request, functools.partial(self._on_event, answer))
            try:
                end = await answer
            except asyncio.CancelledError:
                self._service.abort(request.id)
                raise
        finally:
            self._num_waiting -= 1
        if end.reason not in ("stop", "length"):
            raise completer.EngineError(
                f"The engine fails for a request: {end.message}"
            )
        return end.completion

    def close(self) -> None:
        """Lets the engine run without waiting; call it when the loop ends."""
        self._is_closed = True
        self._is_over.set()

    def _on_event(
        self, answer: asyncio.Future[events.End], event: events.Event
    ) -> None:
        """Notes the end of a request, in the engine's thread."""
        if isinstance(event, events.End):
            self._ended.append((answer, event))
            self._hold(answer)

    def _hold(self, answer: asyncio.Future) -> None:
        """Makes the engine wait before its next dispatch, while coroutines run.

        First all answers of the last dispatch are given, in their order.
        """
        if self._is_held:
            return
        self._is_held, loop = True, answer.get_loop()

        def turn(num_left: int) -> None:
            if num_left:
                loop.call_soon(turn, num_left - 1)
            else:
                self._is_over.set()

        def begin() -> None:
            while self._ended:
                _set(*self._ended.popleft())
            turn(_NUM_ROUNDS)

        def wait(_: Any) -> None:
            self._is_held = False
            self._is_over.clear()
            if not self._is_closed:
                loop.call_soon_threadsafe(begin)
                self._is_over.wait(_HOLD_SECONDS)

        try:
            self._service.call(wait)
        except events.ClosedError:
            # No dispatch comes, and this may be the loop's own thread.
            self._is_held = False
            if not self._is_closed:
                loop.call_soon_threadsafe(begin)


def _set(answer: asyncio.Future[T], result: T) -> None:
    """Sets a result, unless the future was cancelled."""
    if not answer.done():
        answer.set_result(result)
