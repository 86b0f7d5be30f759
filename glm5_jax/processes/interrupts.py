"""Ends a process at once on SIGTERM or ctrl-C, whatever it does. Imports no jax.

Python runs a handler between two of its instructions: not while XLA compiles, which
takes a minute, and whose threads crash where Python is taken down beside them. A thread
hears of the signal at once and ends the process without taking anything down. Nothing
is lost by that: what is written, is written whole or not at all.
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
    """Inside, the signals end the process with 143, unless other handlers are set.

    Only a main thread can hear signals.
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
    """Inside, a process that ends at once calls `undo` first; no `finally` is run."""
    _undone_first.insert(0, undo)
    try:
        yield
    finally:
        _undone_first.remove(undo)


def end_at_once(*_: object) -> None:
    """Ends this process, as a handler of a signal."""
    if _is_ending.acquire(blocking=False):
        for undo in _undone_first:  # the innermost first
            with contextlib.suppress(Exception):
                undo()
        sys.stderr.write("\nerror: asked to end; the same command goes on later.\n")
        sys.stderr.flush()
        os._exit(EXIT_TERMINATED)


def _listen(hear: int) -> None:
    """Python writes the number of each signal into the pipe, when it comes."""
    while number := os.read(hear, 1):
        if signal.getsignal(number[0]) is end_at_once:
            end_at_once()
