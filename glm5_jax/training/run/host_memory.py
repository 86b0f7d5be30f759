"""Host memory on Linux: large pages for a step, and the compiler's memory given back.

XLA on CPU maps the temporaries of a step again each time, and the kernel clears them
page by page: 138,000 faults and 0.3 of 1.3 seconds at the bench shape
(docs/design/0003). Imports no jax.
"""

import ctypes
import os
import sys

_TUNABLES, _LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def restart_with_large_pages() -> None:
    """Restarts this program with large pages in malloc, unless malloc is tuned.

    glibc reads the setting when a process starts. Other C libraries ignore it.
    """
    if sys.platform.startswith("linux") and _TUNABLES not in os.environ:
        os.environ[_TUNABLES] = _LARGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def trim() -> None:
    """Returns freed blocks to the system: after compiling, more than half."""
    if sys.platform.startswith("linux"):
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if malloc_trim is not None:  # only glibc has it
            malloc_trim(0)


def peak_gib() -> float | None:
    """Returns the largest resident size so far, in GiB; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 2)
