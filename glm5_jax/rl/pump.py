"""Lets coroutines use an engine, and call environments without blocking each other.

The coroutines run in one thread, and the engine in the thread of its service. The
engine waits for coroutines whose requests have just finished, so that equal runs have
equal dispatches. Calls of environments are awaited with a time limit.
"""

import asyncio
import collections
import contextlib
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from absl import logging

from glm5_jax.inference import events, requests
from glm5_jax.inference import service as service_lib
from glm5_jax.rl import event_loop

# Rounds of the event loop in which finished episodes can submit their next request
# before the next dispatch. From the end of an episode to the first prompt of the next
# takes 10 rounds of 2 us.
_NUM_ROUNDS = 16
_HOLD_SECONDS = 10.0  # that the engine waits for an event loop that does not turn
_CANCEL_SECONDS = 1.0  # for a cancelled call to clean up
_CLEAN_SECONDS = 10.0  # for all episodes to close after ctrl-C

T = TypeVar("T")


class LateError(Exception):
    """Raised if a call does not return in time."""


class EngineError(RuntimeError):
    """Raised if the engine fails for a request."""


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
            raise EngineError(f"The engine fails for a request: {end.message}")
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

        def wait(_: Any = None) -> None:
            self._is_held = False
            self._is_over.clear()
            if not self._is_closed:
                loop.call_soon_threadsafe(begin)
                self._is_over.wait(_HOLD_SECONDS)

        try:
            self._service.call(wait)
        except events.ClosedError:
            wait()


def _set(answer: asyncio.Future[T], result: T) -> None:
    """Sets a result, unless the future was cancelled."""
    if not answer.done():
        answer.set_result(result)


async def bounded(
    call: Callable[[], Awaitable[Any]], seconds: float, guest: object
) -> Any:
    """Returns the result of `call` if it arrives within `seconds`.

    The call belongs to `guest`, which can cancel only its own tasks. A call that
    ignores its cancellation is abandoned.

    Raises:
        LateError: the call did not return in time.
        Exception: the call raised it. A SystemExit and the like become RuntimeErrors.
    """
    context = event_loop.context_of(guest)
    task = asyncio.create_task(_contained(call), context=context)
    task.add_done_callback(_retrieve)
    deadline = time.monotonic() + seconds
    try:
        while not task.done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise LateError(f"took longer than {seconds:.3g} s")
            await asyncio.wait({task}, timeout=left)
        if task.cancelled():
            raise RuntimeError("the call cancelled itself")
        if isinstance(task.exception(), GeneratorExit):  # raised, not thrown in
            raise RuntimeError("the call raised GeneratorExit")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
            if not task.done():
                logging.error("A call of an environment ignores being cancelled.")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a new event loop.

    Unlike asyncio.run, it does not wait for tasks that ignore their cancellation. It
    also works while another loop is running, as in a notebook.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    with futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(_run, main).result()


def _run(main: Coroutine[Any, Any, T]) -> T:
    loop = event_loop.Loop()
    task = loop.create_task(main)
    task.add_done_callback(_retrieve)
    try:
        return loop.run_until_complete(task)
    finally:
        if not task.done():  # ctrl-C: lets the coroutines clean up
            task.cancel()
            with contextlib.suppress(KeyboardInterrupt):
                loop.run_until_complete(asyncio.wait({task}, timeout=_CLEAN_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _contained(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # would end the loop, and every episode with it
        raise RuntimeError(f"the call raised {error!r}") from error


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Marks an exception as retrieved; asyncio would log one that is not."""
    if not task.cancelled():
        task.exception()
