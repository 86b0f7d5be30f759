"""Ends a process at once on SIGTERM or ctrl-C, whatever it does. Imports no jax.

Python runs signal handlers between two of its instructions, hence not while XLA
compiles, which takes a minute; and XLA's threads crash if Python shuts down beside
them. Here a thread receives the signal at once and ends the process without a shutdown.
Nothing is lost: files are written whole or not at all.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

EXIT_TERMINATED = 143
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_is_ending = threading.Lock()
_undone_first: list[Callable[[], None]] = []


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Makes the signals end the process with exit code 143 until the block ends.

    Handlers that are set inside the block take precedence. Outside the main thread,
    which alone receives signals, this is a no-op.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hear, tell = os.pipe()
    os.set_blocking(tell, False)
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, end_at_once) for number in SIGNALS}
    listener = threading.Thread(target=_listen, args=(hear,), daemon=True)
    listener.start()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(tell)
        listener.join()
        os.close(hear)


@contextlib.contextmanager
def undoing(undo: Callable[[], None]) -> Iterator[None]:
    """Makes a process that ends at once call `undo` first; no `finally` block runs."""
    _undone_first.insert(0, undo)
    try:
        yield
    finally:
        _undone_first.remove(undo)


def end_at_once(*_: object) -> None:
    """Ends this process; a signal handler."""
    if _is_ending.acquire(blocking=False):
        for undo in _undone_first:  # the innermost first
            with contextlib.suppress(Exception):
                undo()
        sys.stderr.write("\nerror: interrupted; rerun the same command to resume.\n")
        sys.stderr.flush()
        os._exit(EXIT_TERMINATED)


def _listen(hear: int) -> None:
    """Reads the pipe into which Python writes the number of each signal."""
    while number := os.read(hear, 1):
        if signal.getsignal(number[0]) is end_at_once:
            end_at_once()
