"""An event loop whose clock jumps to the next timer, so that hours take milliseconds.

    result, seconds = virtual_time.run(main())

All runs in one thread and in one order: what asyncio.to_thread calls is called at once.
time.monotonic tells the loop's time. A loop for which nothing is left to wait for, as
where all wait for each other, raises StuckError instead of waiting for ever. Nothing in
it may wait for a socket, a process or a thread.
"""

import asyncio
import contextlib
import contextvars
import time
from unittest import mock

from glm5_jax.rl import event_loop


class StuckError(RuntimeError):
    """Raised if every coroutine waits, and no timer is set."""


class Loop(event_loop.Loop):
    """The loop of episodes, with a clock of its own that begins at 0."""

    def __init__(self):
        super().__init__()
        self._now = 0.0
        self._selector = _Selector(self._selector, self._advance)

    def time(self):
        return self._now

    def run_in_executor(self, executor, function, *args):
        done = self.create_future()
        try:
            done.set_result(contextvars.copy_context().run(function, *args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _advance(self, seconds):
        self._now += seconds


class _Selector:
    """Asks a selector without waiting; the time that it would wait passes at once."""

    def __init__(self, selector, advance):
        self._selector, self._advance = selector, advance

    def __getattr__(self, name):
        return getattr(self._selector, name)

    def select(self, timeout=None):
        found = self._selector.select(0)
        if not found and timeout is None:
            raise StuckError("nothing is left to happen")
        if not found and timeout > 0:
            self._advance(timeout)
        return found


def run(main):
    """Returns the result of a coroutine, and the seconds that it took."""
    loop = Loop()
    with (
        contextlib.closing(loop),
        mock.patch.object(time, "monotonic", loop.time),
    ):
        try:
            return loop.run_until_complete(loop.create_task(main)), loop.time()
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_asyncgens())
