"""Bounds the memory of Chromium's processes: each page has one of its own."""

import asyncio
import contextlib
import os
import signal
import threading

from glm5_jax.environments.sandbox import processes

MOST_BYTES = 2 * 2**30  # of a process
_WATCH_SECONDS = 1.0


async def watch() -> None:
    """Ends the processes of this thread's browsers that are too large.

    The page of such a process crashes, alone.
    """
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        for driver in processes.children(os.getpid(), threading.get_native_id()):
            for pid, size in processes.sizes(driver):
                if size > MOST_BYTES:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
