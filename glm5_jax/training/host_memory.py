"""Host memory on Linux CPUs: what the compiler freed goes, what a step frees stays.

XLA allocates a step's temporaries anew each time. By default glibc maps large blocks
and returns them to the kernel, which then clears the same pages for every step: 0.4
of 2.0 CPU-seconds at the bench shape (docs/design/0003).
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1


def settle() -> bool:
    """Once the step is compiled: gives freed blocks back, then has glibc keep them.

    Returns:
      Whether there is a glibc to tell.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library
        return False
    libc.malloc_trim(0)  # 0.7 GB of the compiler's at the bench shape
    maps = libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
    trims = libc.mallopt(_TRIM_THRESHOLD, _LARGEST)
    return bool(maps and trims)


def peak_gib() -> float | None:
    """The largest resident size so far, in GiB; None where no one counts it."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 2)
