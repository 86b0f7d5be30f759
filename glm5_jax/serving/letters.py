"""Carries events from the engine's thread to an event loop, all of a dispatch at once.

To wake a loop costs a system call. An engine with 64 streams has 64 events a dispatch,
and the loop seldom wakes before the last of them is written.
"""

import asyncio
import collections
from typing import Generic, TypeVar

T = TypeVar("T")


class Letters(Generic[T]):
    """Letters of other threads for queues of one event loop, in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Carries nothing yet."""
        self._loop = loop
        self._sent: collections.deque[tuple[asyncio.Queue[T], T]] = collections.deque()
        self._is_woken = False

    def send(self, queue: asyncio.Queue[T], letter: T) -> None:
        """Puts a letter into a queue of the loop soon; any thread may call it.

        Raises:
            RuntimeError: the loop is closed.
        """
        self._sent.append((queue, letter))
        # `_arrive` clears the mark before it looks, so no letter stays behind.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._arrive)

    def _arrive(self) -> None:
        """Delivers all letters, in the loop's thread."""
        self._is_woken = False
        while self._sent:
            queue, letter = self._sent.popleft()
            queue.put_nowait(letter)
