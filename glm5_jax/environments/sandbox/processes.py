"""Processes of this machine."""

import contextlib
import mmap
import pathlib


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started."""
    try:
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def resident_bytes(pid: int) -> int:
    """Returns the memory of all that a process has started, without its own.

    Pages that several of them share count for each.
    """
    total = 0
    for child in children(pid):
        with contextlib.suppress(OSError, IndexError):  # it may have ended
            words = pathlib.Path(f"/proc/{child}/statm").read_text().split()
            total += int(words[1]) * mmap.PAGESIZE
        total += resident_bytes(child)
    return total
