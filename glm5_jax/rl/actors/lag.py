"""Measures how late an event loop is, and names the code that blocks it."""

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from absl import logging

_LATE_SECONDS = 1.0  # above which a warning is logged
_LOOK_SECONDS = 10.0  # a loop that did not turn in them is blocked
_SHOWN = 4  # calls that are shown of a loop that is blocked, the innermost


class Lag:
    """The delays of an event loop."""

    def __init__(self) -> None:
        """Measures nothing yet."""
        self.longest = 0.0  # seconds, since the last `taken`
        self._num_turns = 0

    def taken(self) -> float:
        """Returns the longest delay since the last call."""
        longest, self.longest = self.longest, 0.0
        return longest

    async def measure(self) -> None:
        """Measures, until cancelled; a late loop delays every episode."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.1)
            self._num_turns += 1
            lag = time.monotonic() - before - 0.1
            self.longest = max(self.longest, lag)
            if lag > _LATE_SECONDS:
                logging.warning(
                    "The event loop was late by %.1f s: an environment blocks it. Its "
                    "long computations belong into asyncio.to_thread.",
                    lag,
                )

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Logs what this thread does whenever its loop stops turning, in the block."""
        over, own = threading.Event(), threading.get_ident()

        def look() -> None:
            seen, is_named = -1, False
            while not over.wait(_LOOK_SECONDS):
                turns, seen = seen, self._num_turns
                if turns != seen:
                    is_named = False
                elif not is_named:
                    is_named = True
                    frame = sys._current_frames().get(own)
                    stack = traceback.format_stack(frame)[-_SHOWN:]
                    logging.error(
                        "The event loop has not turned for %g s. It is in\n%s",
                        _LOOK_SECONDS,
                        "".join(stack),
                    )

        thread = threading.Thread(target=look, name="lag", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
