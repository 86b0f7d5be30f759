"""Ends a run that hangs, with the stacks of all threads in its folder."""

import collections
import contextlib
import faulthandler
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator

EXIT_HUNG = 1
TIMES_MEDIAN = 10  # a step may take this many times the median one


class Watchdog:
    """Counts the seconds since the last beat; a context manager.

    A process that hangs in a collective cannot end itself, but one of its threads can.
    Each process of a run has its own watchdog and leaves its stacks. The process that
    is not in a collective is the one to look at.
    """

    def __init__(self, path: pathlib.Path, min_seconds: float) -> None:
        """Prepares to watch.

        Args:
          path: where the stacks go.
          min_seconds: seconds without a beat that are always allowed; 0: no limit.
        """
        self._path, self._min_seconds = path, min_seconds
        self._steps: collections.deque[float] = collections.deque(maxlen=64)
        self._last = time.monotonic()
        self._is_over, self._is_paused = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        """Begins to watch."""
        self.beat()
        if self._min_seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops watching."""
        self._is_over.set()
        if self._min_seconds:
            self._thread.join()

    def beat(self, step_seconds: float | None = None) -> None:
        """Records progress of the run; after a step, also its seconds."""
        self._last = time.monotonic()
        if step_seconds is not None:
            self._steps.append(step_seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends the watchdog for a block that waits for a disk."""
        self._is_paused = True
        try:
            yield
        finally:
            self.beat()
            self._is_paused = False

    @property
    def limit(self) -> float:
        """Seconds without a beat after which the process ends."""
        usual = statistics.median(self._steps) if self._steps else 0.0
        return max(TIMES_MEDIAN * usual, self._min_seconds)

    def _watch(self) -> None:
        while not self._is_over.wait(min(self._min_seconds / 10, 5.0)):
            if self._is_paused:  # asked first: the beat that ends a pause comes before
                continue
            waited = time.monotonic() - self._last
            if waited > self.limit:
                self._end(waited)

    def _end(self, waited: float) -> None:
        # A full disk must not keep the process from ending.
        with contextlib.suppress(OSError), self._path.open("w") as file:
            file.write(f"No step for {waited:.0f} s, at {time.ctime()}.\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        sys.stderr.write(
            f"error: no step for {waited:.0f} s (health.watchdog_seconds, or "
            f"{TIMES_MEDIAN} times the median step): the run hangs and is ended; "
            f"{self._path} has the stacks of all threads. The same command resumes "
            f"from the newest checkpoint.\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_HUNG)  # a clean-up would hang as well
