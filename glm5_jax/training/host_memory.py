"""Host memory on CPU: keep what was freed, for the next step wants it again.

XLA allocates a step's temporaries anew each time. By default glibc maps large blocks
and returns them to the kernel, which then clears the same pages for every step: 0.4
of 2.0 CPU-seconds at the bench shape (docs/log.md).
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_LARGEST = 2**31 - 1


def keep_freed() -> bool:
    """Tells glibc to keep freed blocks; returns whether there is a glibc to tell."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    results = [
        mallopt(_MMAP_THRESHOLD, _LARGEST),
        mallopt(_TRIM_THRESHOLD, _LARGEST),
        mallopt(_ARENA_MAX, 1),
    ]
    return all(results)
