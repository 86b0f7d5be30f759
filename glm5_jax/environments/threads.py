"""Threads for `asyncio.to_thread`, of which those that hang keep nobody waiting.

asyncio's own pool has a few threads. A call that never returns holds one for ever, so a
few such calls stop all others, and Python's exit waits for them.
"""

import collections
import os
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from absl import logging

_MOST = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio's own
_LATE_SECONDS = 10.0


class Threads(futures.ThreadPoolExecutor):
    """An executor of an event loop.

    At most `most` calls run at once, but for those that have run for `seconds`, for
    which others no longer wait. Python exits without waiting for any. A thread lives
    until `shutdown`: Linux ends what it started with PR_SET_PDEATHSIG when it ends.
    """

    def __init__(self, most: int = _MOST, seconds: float = _LATE_SECONDS) -> None:
        """Starts no thread yet."""
        super().__init__(1)  # a loop takes no other class; its own thread never starts
        self._most, self._seconds = most, seconds
        self._change = threading.Condition()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        # Since when threads have their calls, by number; late ones are left out.
        self._prompt: dict[int, float] = {}
        self._number = 0  # of the last thread
        self._num_idle = self._num_waking = 0
        self._is_watched = False

    def submit(
        self, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> futures.Future:
        """Runs a call in a thread; returns its future.

        Raises:
          RuntimeError: `shutdown` was called.
        """
        future: futures.Future = futures.Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._change:
            if self._shutdown:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append(call)
            self._wake()
            if len(self._calls) > self._num_waking and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads that have no call; waits for none."""
        super().shutdown(wait=False)
        with self._change:
            self._change.notify_all()

    def _wake(self) -> None:
        """Wakes or starts threads for the calls that may run; the lock is held."""
        now = time.monotonic()
        if len(self._prompt) == self._most:
            for number, began in [*self._prompt.items()]:
                if now - began > self._seconds:
                    del self._prompt[number]
                    logging.log_every_n_seconds(
                        logging.WARNING,
                        "A call in asyncio.to_thread has taken %.0f s. It goes on, and "
                        "another thread takes its place.",
                        600,
                        now - began,
                    )
        room = self._most - len(self._prompt)
        while self._num_waking < min(len(self._calls), room):
            self._num_waking += 1
            if self._num_idle:
                self._num_idle -= 1
                self._change.notify()
                continue
            self._number += 1
            name = f"asyncio_{self._number}"
            start = threading.Thread(
                target=self._work, args=(self._number,), name=name, daemon=True
            )
            start.start()

    def _work(self, number: int) -> None:
        """Is a thread."""
        with self._change:  # held from waking to working: else others are started
            self._num_waking -= 1
            call = self._next(number)
        while call is not None:
            call()
            call = None  # so that a thread that waits keeps nothing of it
            with self._change:
                self._prompt.pop(number, None)
                call = self._next(number)

    def _next(self, number: int) -> Callable[[], None] | None:
        """Waits for a thread's call; None after `shutdown`. The lock is held."""
        while not self._calls or len(self._prompt) >= self._most:
            if self._shutdown:
                return None
            self._num_idle += 1
            self._change.wait()
            if self._shutdown and not self._calls:
                return None
            self._num_waking -= 1
        self._prompt[number] = time.monotonic()
        return self._calls.popleft()

    def _watch(self) -> None:
        """Lets other threads take the place of late ones while calls wait."""
        while True:
            time.sleep(self._seconds / 4)
            with self._change:
                if not self._calls:
                    self._is_watched = False
                    return
                self._wake()
