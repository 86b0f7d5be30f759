"""Requests to end a run: SIGTERM or ctrl-C, to one of its processes or to all."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from glm5_jax.processes import interrupts

EXIT_TERMINATED = interrupts.EXIT_TERMINATED  # after a checkpoint


@contextlib.contextmanager
def listening() -> Iterator[Callable[[int], bool]]:
    """Yields a function that tells after each step whether the run must end.

    A second ctrl-C ends the process at once, with the same exit code. With several
    processes jax.distributed listens for SIGTERM to any of them and chooses the step at
    which all stop. Only a main thread can receive signals.
    """
    # No threading.Event, whose lock a second signal within the first would wait for.
    asked: list[int] = []
    is_alone = jax.process_count() == 1
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return

    def terminated(number: int, *_: object) -> None:
        asked.append(number)

    def interrupted(number: int, *_: object) -> None:
        signal.signal(signal.SIGINT, interrupts.end_at_once)
        asked.append(number) if is_alone else os.kill(os.getpid(), signal.SIGTERM)

    before = {signal.SIGINT: signal.signal(signal.SIGINT, interrupted)}
    if is_alone:
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, terminated)
    try:
        if is_alone:
            yield lambda step: bool(asked)
        else:
            yield multihost_utils.reached_preemption_sync_point
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
