"""The pipes of one shell: what it is told, what it answers, and what it prints.

They have names, by which the shell opens them, and each shell gets new ones: nothing
that an earlier shell wrote, or did to its pipes, reaches a later one.
"""

import asyncio
import contextlib
import os
import pathlib
import shlex
from collections.abc import Callable

_TOLD, _ANSWERS, _OUT, _ERR = _NAMES = "told", "answers", "out", "err"
_READ_BYTES = 2**16
# A pipe holds a MiB at most, and who fills it meanwhile may not hold us.
_MOST_READS = 17


def redirections(folder: pathlib.Path) -> str:
    """Returns the words by which a shell opens its pipes; it answers at descriptor 3.

    Args:
        folder: of the pipes.
    """
    told, answers, out, err = (shlex.quote(str(folder / name)) for name in _NAMES)
    return f"<{told} 3>{answers} >{out} 2>{err}"


class Stream:
    """What comes through a pipe; all of it is read, so that no command waits."""

    def __init__(self, pipe: int, limit: int) -> None:
        """Begins to read a pipe.

        Args:
            pipe: its descriptor.
            limit: bytes that are kept.
        """
        self._pipe, self._limit = pipe, limit
        self._kept = bytearray()
        self._num_bytes = 0
        asyncio.get_running_loop().add_reader(pipe, self._read)

    def take(self) -> tuple[str, bool]:
        """Returns the text since the last call, and whether it was cut."""
        for _ in range(_MOST_READS):
            if self._read() < _READ_BYTES:
                break
        text = self._kept.decode(errors="replace")
        is_cut = self._num_bytes > len(self._kept)
        self._kept.clear()
        self._num_bytes = 0
        return text, is_cut

    def _read(self) -> int:
        chunk = _read(self._pipe)
        self._num_bytes += len(chunk)
        self._kept += chunk[: self._limit - len(self._kept)]
        return len(chunk)


class Pipes:
    """The four pipes of a shell that is to be started."""

    def __init__(
        self,
        folder: pathlib.Path,
        owner: int,
        limit: int,
        hear: Callable[[bytes], None],
    ) -> None:
        """Makes the pipes.

        Args:
            folder: has no pipes.
            owner: number of the user that the shell runs as.
            limit: bytes that are kept of each of the shell's two streams.
            hear: is called with the parts of what the shell answers.

        Raises:
            OSError: the machine has no descriptor or no space left; no pipe remains.
        """
        self._folder, self._pipes = folder, dict[str, int]()
        self._unsent = bytearray()
        try:
            for name in _NAMES:
                self._pipes[name] = _open(folder / name, owner)
        except OSError:
            self.close()
            raise
        self.out = Stream(self._pipes[_OUT], limit)
        self.err = Stream(self._pipes[_ERR], limit)
        answers = self._pipes[_ANSWERS]
        loop = asyncio.get_running_loop()
        loop.add_reader(answers, lambda: hear(_read(answers)))

    def tell(self, line: bytes) -> None:
        """Sends a line, as fast as the shell takes it."""
        self._unsent += line
        self._send()

    def close(self) -> None:
        """Drops the pipes with what is in them."""
        loop = asyncio.get_running_loop()
        for pipe in self._pipes.values():
            loop.remove_reader(pipe)
            loop.remove_writer(pipe)
            os.close(pipe)
        self._pipes.clear()
        for name in _NAMES:
            (self._folder / name).unlink(missing_ok=True)

    def _send(self) -> None:
        loop, pipe = asyncio.get_running_loop(), self._pipes[_TOLD]
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: os.write(pipe, self._unsent)]
        if self._unsent:
            loop.add_writer(pipe, self._send)
        else:
            loop.remove_writer(pipe)


def _open(path: pathlib.Path, owner: int) -> int:
    os.mkfifo(path, 0o600)
    if owner != os.geteuid():
        os.chown(path, owner, -1)
    # For both directions: then opening waits for nobody, and nothing ends here.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def _read(pipe: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(pipe, _READ_BYTES)
    return b""
