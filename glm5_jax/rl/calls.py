"""Calls code of environments without trusting it, and runs coroutines to their end.

Each call has a time limit. No call can end the event loop, or cancel what it does not
own.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from absl import logging

from glm5_jax.environments import threads
from glm5_jax.rl import event_loop

_CANCEL_SECONDS = 1.0  # for a cancelled call to clean up
_CLEAN_SECONDS = 10.0  # for all episodes to close after ctrl-C

T = TypeVar("T")


class LateError(Exception):
    """Raised if a call does not return in time."""


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
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise LateError(f"took longer than {seconds:.3g} s")
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


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which is not cancelled if the caller is.

    Raises:
        CancelledError: the caller was cancelled; it is raised when `work` has ended.
    """
    task, cancellation = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        _retrieve(task)
        raise cancellation
    return task.result()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a new event loop.

    Unlike asyncio.run, it does not wait for tasks that ignore their cancellation. It
    also works while another loop is running, as in a notebook.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    with futures.ThreadPoolExecutor() as executor:
        return executor.submit(_run, main).result()


def _run(main: Coroutine[Any, Any, T]) -> T:
    loop = event_loop.Loop()
    loop.set_default_executor(threads.Threads())
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
