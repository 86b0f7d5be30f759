"""A box: a persistent shell, commands one after another, files in and out.

The holder (bubblewrap.py, plain.py) reads a line and then runs the inner shell until it
ends; the inner shell reads a command a line, with every byte escaped, and says with
what code each ended. Both hear and speak over descriptor 0, a socket that commands do
not have. So the end of a command is known although processes that it left in the
background still hold its output, and nothing that a command prints can be mistaken for
its end.

No Python code runs between fork and exec, so that a process with jax may start boxes.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import pathlib
import resource
import shlex
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from glm5_jax.environments.sandbox import image as image_lib
from glm5_jax.environments.sandbox import limits as limits_lib
from glm5_jax.environments.sandbox import processes

_LOOP = """while IFS= read -r _line; do
  printf -v _line %b "$_line"
  eval "$_line" </dev/null
  printf 'done %d\\n' $? >&0
done"""
_SHELL = ["bash", "--noprofile", "--norc", "-c", _LOOP]
_SECONDS_TO_START = 60.0  # on a machine that starts a thousand
_SECONDS_TO_DIE = 10.0
_WATCH_SECONDS = 0.2  # between two looks at the memory
_READ_BYTES = 2**16
_ESCAPED = [f"\\x{byte:02x}" for byte in range(256)]
for _byte in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ./-_=,:":
    _ESCAPED[_byte] = chr(_byte)


@runtime_checkable
class Kind(Protocol):
    """A module that starts shells."""

    def holder(
        self,
        room: pathlib.Path,
        stage: pathlib.Path,
        image: image_lib.Image,
        shell: list[str],
        limits: limits_lib.Limits,
    ) -> list[str]:
        """Returns the command of a holder."""
        ...

    def confined(self, words: Sequence[str], binds: Sequence[str] = ()) -> list[str]:
        """Returns the command that runs one program by itself."""
        ...

    def kill(self, pid: int) -> None:
        """Ends what the holder's child started, and the inner shell before it."""
        ...


class BrokenError(Exception):
    """Raised when a box could not be started, or has ended."""


NO_OUTPUT = "(no output)"


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a command."""

    exit_code: int | None  # None: it did not end by itself
    stdout: str
    stderr: str
    is_timeout: bool  # the box's processes were ended; its files remain
    is_cut: bool  # a stream was longer than Limits.output_bytes
    seconds: float

    def text(self) -> str:
        """Returns what an agent reads: both streams, and how the command ended."""
        if self.is_timeout:
            ending = f"[stopped after {self.seconds:.0f} s; the shell is a new one]"
        elif self.exit_code is None:
            ending = "[the shell ended; the next command gets a new one]"
        else:
            ending = f"[exit code {self.exit_code}]" if self.exit_code else ""
        cut = "[output was cut]" if self.is_cut else ""
        parts = (self.stdout, self.stderr, cut, ending)
        return "\n".join(part.rstrip("\n") for part in parts if part) or NO_OUTPUT


class _Stream:
    """What comes through a pipe; all of it is read, so that no command waits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.num_bytes = 0
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)
        asyncio.get_running_loop().add_reader(self._read, self.drain)

    def drain(self) -> None:
        """Takes all that there is."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._read, _READ_BYTES):
                self.num_bytes += len(chunk)
                self._kept += chunk[: self._limit - len(self._kept)]
                if len(chunk) < _READ_BYTES:
                    return
            asyncio.get_running_loop().remove_reader(self._read)  # no writer is left

    def take(self) -> tuple[str, bool]:
        """Returns the text since the last call, and whether it was cut."""
        self.drain()
        text = self._kept.decode(errors="replace")
        is_cut = self.num_bytes > len(self._kept)
        self._kept.clear()
        self.num_bytes = 0
        return text, is_cut

    def close(self) -> None:
        """Closes the end that is read."""
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)


class Box:
    """A started box; its methods must not run at the same time."""

    def __init__(
        self, kind: Kind, limits: limits_lib.Limits, folder: pathlib.Path
    ) -> None:
        """Opens the pipes; `start` makes boxes."""
        self._kind, self._limits, self._folder = kind, limits, folder
        self._out, self._err = (_Stream(limits.output_bytes) for _ in range(2))
        self._said: asyncio.StreamReader | None = None
        self._says: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._is_alive = False  # the inner shell

    async def run(self, command: str, seconds: float | None = None) -> Result:
        """Runs a command of the shell, whose folder and variables stay for the next.

        Args:
            command: without zero bytes.
            seconds: at most; None takes the limits'. Then all processes of the box end,
                and the next command gets a new shell in /work.

        Raises:
            BrokenError: the box has ended.
        """
        began = time.monotonic()
        seconds = self._limits.seconds if seconds is None else seconds
        self._out.take(), self._err.take()  # of processes in the background
        if not self._is_alive:
            self._send("start")
            self._is_alive = True
        self._send("".join(_ESCAPED[byte] for byte in command.encode()))
        code, is_timeout = None, False
        try:
            async with asyncio.timeout(seconds):
                code = await self._watched_end()
        except TimeoutError:
            is_timeout = True
            await self._kill_shell()
        (out, out_cut), (err, err_cut) = self._out.take(), self._err.take()
        taken = time.monotonic() - began
        return Result(code, out, err, is_timeout, out_cut or err_cut, taken)

    async def write(self, path: str, content: bytes) -> None:
        """Writes a file; a path below /work may be relative.

        Raises:
            BrokenError: it could not be written.
        """
        at = shlex.quote(path)
        text = "".join(_ESCAPED[b] if b else "\\0" for b in content)
        text = text.replace("'", "\\x27")
        made = f"mkdir -p -- \"$(dirname -- {at})\" && printf %b '{text}' > {at}"
        done = await self.run(f"( cd /work && {made} )")
        if done.exit_code != 0:
            raise BrokenError(f"{path} could not be written: {done.stderr.strip()}")

    async def read(self, path: str) -> bytes:
        """Returns the content of a file.

        Raises:
            BrokenError: it could not be read, or is longer than half the output limit.
        """
        command = f"( cd /work && od -An -v -tx1 -- {shlex.quote(path)} )"
        done = await self.run(command)
        if done.exit_code != 0 or done.is_cut:
            reason = done.stderr.strip() or "it is too long"
            raise BrokenError(f"{path} could not be read: {reason}")
        return bytes.fromhex(done.stdout)

    async def restart(self) -> None:
        """Ends all processes; files of /work remain, and the next command is new."""
        await self._kill_shell()

    async def close(self) -> None:
        """Ends all processes and drops the files."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                await self._kill_shell()
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self._process = None
        if self._says is not None:
            self._says.close()
            with contextlib.suppress(ConnectionError):
                await self._says.wait_closed()
        self._out.close()
        self._err.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _begin(self, command: list[str]) -> None:
        """Starts the holder."""
        own, other = socket.socketpair()
        with other:
            self._said, self._says = await asyncio.open_connection(sock=own)
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=other.fileno(),
                stdout=self._out.write,
                stderr=self._err.write,
                start_new_session=True,
            )
        for end in (self._out.write, self._err.write):
            os.close(end)
        async with asyncio.timeout(_SECONDS_TO_START):
            said = await self._heard()
        if said != b"ready\n":
            raise BrokenError(f"the box did not start: {self._err.take()[0].strip()}")

    async def _watched_end(self) -> int | None:
        """Waits as `_end` does; ends all processes that take too much memory."""
        if math.isinf(self._limits.resident_bytes):
            return await self._end()
        assert self._process is not None
        end = asyncio.ensure_future(self._end())
        try:
            while not (await asyncio.wait({end}, timeout=_WATCH_SECONDS))[0]:
                taken = processes.resident_bytes(self._process.pid)
                if taken > self._limits.resident_bytes:
                    self._kill_children()
            return end.result()
        finally:
            end.cancel()

    async def _end(self) -> int | None:
        """Waits for the end of a command; returns its code, None if the shell ended."""
        said = await self._heard()
        if said.startswith(b"done "):
            return int(said.split()[1])
        self._is_alive = False
        if said != b"ended\n":
            raise BrokenError(f"the box has ended: {self._err.take()[0].strip()}")
        return None

    async def _kill_shell(self) -> None:
        """Ends the inner shell and all that it started."""
        assert self._process is not None
        if not self._is_alive:
            return
        self._kill_children()
        async with asyncio.timeout(_SECONDS_TO_DIE):
            while await self._end() is not None:
                pass

    def _kill_children(self) -> None:
        assert self._process is not None
        for pid in processes.children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                self._kind.kill(pid)

    def _send(self, line: str) -> None:
        assert self._says is not None
        self._says.write(line.encode() + b"\n")

    async def _heard(self) -> bytes:
        """Returns the next line of the holder or the inner shell, b"" at their end."""
        assert self._said is not None
        with contextlib.suppress(ConnectionError):
            return await self._said.readline()
        return b""


async def start(kind: Kind, image: image_lib.Image, limits: limits_lib.Limits) -> Box:
    """Starts a box.

    Args:
        kind: of the box.
        image: the box's files.
        limits: of the box.

    Raises:
        BrokenError: it did not start.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="glm5_jax_box_"))
    stage, room = folder / "stage", folder / "room"
    for path in (folder, stage, room):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    _allow_many_files()
    box = Box(kind, limits, folder)
    try:
        image.write(stage)
        await box._begin(kind.holder(room, stage, image, _SHELL, limits))
    except BaseException:
        await box.close()
        raise
    await asyncio.to_thread(shutil.rmtree, stage)
    return box


def _allow_many_files() -> None:
    """Raises the soft limit of open files: a box has three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
