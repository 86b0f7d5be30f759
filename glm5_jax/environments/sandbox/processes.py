"""Processes of this machine."""

import contextlib
import mmap
import os
from collections.abc import Iterator


def children(pid: int, thread: int | None = None) -> list[int]:
    """Returns the processes that a process has started.

    Args:
        pid: of the process.
        thread: number of the one thread that counts; None: all.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may have ended
        names = os.listdir(f"/proc/{pid}/task") if thread is None else [thread]
        for name in names:
            found += map(int, _words(f"/proc/{pid}/task/{name}/children"))
    return found


def sizes(pid: int) -> Iterator[tuple[int, int]]:
    """Yields the processes that a process has started, and theirs, with their memory.

    It is in bytes; pages that several of them share count for each.
    """
    for child in children(pid):
        if words := _words(f"/proc/{child}/statm"):
            yield child, int(words[1]) * mmap.PAGESIZE
        yield from sizes(child)


def resident_bytes(pid: int) -> int:
    """Returns the memory of all that a process has started, without its own."""
    return sum(size for _, size in sizes(pid))


def _words(path: str) -> list[bytes]:
    """Returns the words of a file of the kernel, none if it is not there."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        return file.read().split()
    return []
