"""Lets coroutines share an engine and call environments without blocking each other.

Everything runs in one thread. The engine's short steps alternate with the coroutines,
and calls of environments are awaited with a time limit.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
from typing import Any, Protocol, TypeVar, runtime_checkable

from absl import logging

from glm5_jax.inference import requests
from glm5_jax.rl import event_loop

# Yields so that finished episodes can submit their next request before the next step.
# From the end of an episode to the first prompt of the next takes 10 rounds of 2 us.
_NUM_YIELDS = 16
_LONG_STEP = 1.0  # seconds; only a step that compiles takes longer
_CANCEL_SECONDS = 1.0  # for a cancelled call to clean up
_CLEAN_SECONDS = 10.0  # for all episodes to close after ctrl-C

T = TypeVar("T")


@runtime_checkable
class Engine(Protocol):
    """The part of inference.engine.Engine that a pump needs."""

    capacity: int  # tokens of a sequence, prompt and completion

    @property
    def num_pending(self) -> int:
        """Number of requests that have not finished."""
        ...

    def submit(self, request: requests.Request) -> Any:
        """Queues a request for a slot."""
        ...

    def step(self) -> list[tuple[int, requests.Completion]]:
        """Runs one dispatch and returns the requests that finished."""
        ...

    def abort(self, id: int) -> Any:
        """Stops a request."""
        ...


class LateError(Exception):
    """Raised if a call does not return in time."""


class Pump:
    """Steps an engine while requests wait for it."""

    def __init__(self, engine: Engine) -> None:
        """Serves requests to `engine` while `run` is running."""
        self._engine = engine
        self._held_seconds = 0.0  # in long steps, which block the coroutines
        self._waiting: dict[int, asyncio.Future[requests.Completion]] = {}
        self._is_asked = asyncio.Event()

    async def complete(self, request: requests.Request) -> requests.Completion:
        """Returns the engine's completion of a request; aborts it if cancelled."""
        self._engine.submit(request)
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = answer
        self._is_asked.set()
        try:
            return await answer
        finally:
            if self._waiting.pop(request.id, None) is not None:
                self._engine.abort(request.id)

    async def run(self) -> None:
        """Steps the engine until cancelled; raises the engine's errors."""
        while True:
            await self._is_asked.wait()
            while self._waiting:
                if not self._engine.num_pending:
                    raise RuntimeError(f"The engine lost requests {[*self._waiting]}.")
                start = time.monotonic()
                finished = self._engine.step()
                seconds = time.monotonic() - start
                if seconds > _LONG_STEP:
                    self._held_seconds += seconds
                for id, completion in finished:
                    answer = self._waiting.pop(id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(completion)
                for _ in range(_NUM_YIELDS):
                    await asyncio.sleep(0)
            self._is_asked.clear()

    def clock(self) -> float:
        """Returns a time in seconds that stands still while the engine compiles."""
        return time.monotonic() - self._held_seconds


async def bounded(
    call: Callable[[], Awaitable[Any]],
    seconds: float,
    clock: Callable[[], float],
    guest: object,
) -> Any:
    """Returns the result of `call` if it arrives within `seconds` of `clock`.

    The call belongs to `guest`, which can cancel only its own tasks. A call that
    ignores its cancellation is abandoned.

    Raises:
        LateError: the call did not return in time.
        Exception: the call raised it. A SystemExit and the like become RuntimeErrors.
    """
    context = event_loop.context_of(guest)
    task = asyncio.create_task(_contained(call), context=context)
    task.add_done_callback(_retrieve)
    deadline = clock() + seconds
    try:
        while not task.done():
            left = deadline - clock()
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
