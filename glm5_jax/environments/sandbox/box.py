"""A box: a persistent shell, commands one after another, files in and out.

The holder (bubblewrap.py, plain.py) runs the inner shell each time that it is told to,
and says when the shell, and all that it started, has ended. It hears and speaks over a
socket that no shell has. The inner shell reads a command a line, with every byte
escaped, and answers with what code each ended, over pipes of its own (pipes.py). What a
file is to have comes behind the line of its command, as it is. So the
end of a command is known although processes that it left in the background still hold
its output, and nothing that a command prints is mistaken for its end.

A command runs in the inner shell itself, and may make it answer anything. So nobody
trusts a shell that has run an agent's commands: `restart` ends it with all processes of
the box, and the next one has nothing of it but the files.

No Python code runs between fork and exec, so that a process with jax may start boxes.
"""

import asyncio
import base64
import contextlib
import os
import pathlib
import posixpath
import re
import resource
import shlex
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from glm5_jax.environments.sandbox import image as image_lib
from glm5_jax.environments.sandbox import limits as limits_lib
from glm5_jax.environments.sandbox import pipes as pipes_lib
from glm5_jax.environments.sandbox import results

# Commands get neither end of the pipes; bash keeps theirs where no program has them. A
# line that begins with "<" reads the bytes behind it, which `read` takes one by one.
_LOOP = """exec 50>&3 3>&-
while IFS= read -r _line; do
  printf -v _text %b "${_line#<}"
  case $_line in
    '<'*) eval "$_text" 50>&- ;;
    *) eval "$_text" </dev/null 50>&- ;;
  esac
  printf 'done %d\\n' $? >&50
done"""
# Reads all that it is sent, whatever becomes of the file.
_WRITE = """/usr/bin/head -c {size} | (
cd {home} && {{ [ -d {folder} ] || mkdir -p -- {folder}; }} && cat > {path}
code=$?; cat > /dev/null; exit $code )"""
_SHELL = ["bash", "--noprofile", "--norc", "-c", _LOOP]
_SECONDS_TO_START = 60.0  # on a machine that starts a thousand
_SECONDS_TO_DIE = 10.0
_SECONDS_TO_TRY = 0.1  # to end a shell that is starting
_WATCH_SECONDS = 1.0  # between two looks at the memory
_ANSWER = re.compile(rb"done (\d{1,3})\n")
_MOST_HEARD = 2**12  # bytes
_READY, _ENDED = b"ready\n", b"ended\n"  # of the holder
_ESCAPED = [f"\\x{byte:02x}" for byte in range(256)]
for _byte in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ./-_=,:":
    _ESCAPED[_byte] = chr(_byte)


@runtime_checkable
class Kind(Protocol):
    """A module or an object that starts shells."""

    def missing(self) -> str:
        """Returns why the kind does not work here, "" if it does."""
        ...

    def seconds_to_close(self) -> float:
        """Returns the seconds that a holder has to end by itself."""
        ...

    def holder(
        self,
        room: pathlib.Path,
        stage: pathlib.Path,
        image: image_lib.Image,
        shell: list[str],
        limits: limits_lib.Limits,
    ) -> list[str]:
        """Returns the command of a holder; the pipes lie beside the room."""
        ...

    def kill(self, holder: int, tell: Callable[[bytes], object]) -> None:
        """Ends the inner shell and all that it started, if it has been started.

        Args:
            holder: its process.
            tell: sends the holder a line.
        """
        ...

    def resident_bytes(self, holder: int) -> int:
        """Returns the memory of a holder's box, 0 if the holder looks itself."""
        ...

    def owner(self) -> int:
        """Returns the number of the user that shells run as."""
        ...

    def home(self, room: pathlib.Path) -> str:
        """Returns where the box's files are, as its shells see it."""
        ...


class BrokenError(Exception):
    """Raised when a box could not be started, or has ended."""


class FileError(BrokenError):
    """Raised when a file cannot be read or written: what ran in the box may do that."""


class Box:
    """A started box; its methods must not run at the same time."""

    def __init__(
        self, kind: Kind, limits: limits_lib.Limits, folder: pathlib.Path
    ) -> None:
        """Makes a box that is not started; `start` makes boxes."""
        self._kind, self._limits, self._folder = kind, limits, folder
        self._home = shlex.quote(kind.home(folder / "room"))
        self._process: asyncio.subprocess.Process | None = None  # the holder
        self._socket: socket.socket | None = None  # to the holder
        self._heard = b""  # from the holder
        self._pipes: pipes_lib.Pipes | None = None  # of the last inner shell
        self._answer = b""  # of the inner shell, as far as it has come
        self._is_alive = False  # the inner shell
        self._is_busy = False  # the inner shell, also for nobody who waits
        self._waiter: asyncio.Future[int | None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the next look at the memory

    async def run(self, command: str, seconds: float | None = None) -> results.Result:
        """Runs a command of the shell, whose folder and variables stay for the next.

        Args:
            command: without zero bytes.
            seconds: at most; None takes the limits'. Then all processes of the box end,
                and the next command gets a new shell in /work.

        Raises:
            BrokenError: the box has ended.
        """
        return await self._run(command, seconds, None)

    async def _run(
        self, command: str, seconds: float | None, content: bytes | None
    ) -> results.Result:
        """Runs a command, which reads the content, if there is one, and no more."""
        began = time.monotonic()
        seconds = self._limits.seconds if seconds is None else seconds
        if self._is_busy:  # who waited for its last command was cancelled
            await self._kill_shell()
        pipes = self._pipes if self._pipes and self._is_alive else self._start_shell()
        pipes.out.take(), pipes.err.take()  # of processes in the background
        self._is_busy, self._answer = True, b""
        line = "".join(_ESCAPED[byte] for byte in command.encode()).encode() + b"\n"
        pipes.tell(line if content is None else b"<" + line + content)
        code, is_timeout = None, False
        try:
            async with asyncio.timeout(seconds):
                code = await self._news()
        except TimeoutError:
            is_timeout = True
            await self._kill_shell()
        (out, out_cut), (err, err_cut) = pipes.out.take(), pipes.err.take()
        taken = time.monotonic() - began
        return results.Result(code, out, err, is_timeout, out_cut or err_cut, taken)

    async def write(self, path: str, content: bytes) -> None:
        """Writes a file; a path below /work may be relative.

        Raises:
            FileError: it could not be written.
        """
        command = _WRITE.format(
            size=len(content),
            home=self._home,
            folder=shlex.quote(posixpath.dirname(path) or "."),
            path=shlex.quote(path),
        )
        done = await self._run(command, None, content)
        if done.exit_code != 0:
            raise FileError(f"{path} could not be written: {done.reason()}")

    async def read(self, path: str) -> bytes:
        """Returns the content of a file.

        Raises:
            FileError: it could not be read, or is longer than seven tenths of the
                output limit.
        """
        command = f"( cd {self._home} && base64 < {shlex.quote(path)} )"
        done = await self.run(command)
        if done.exit_code != 0 or done.is_cut:
            raise FileError(f"{path} could not be read: {done.reason()}")
        try:
            return base64.b64decode("".join(done.stdout.split()), validate=True)
        except ValueError as error:  # another process has printed, too
            raise FileError(f"{path} could not be read: {error}") from error

    async def restart(self) -> None:
        """Ends all processes; files of /work remain, and the next command is new."""
        await self._kill_shell()

    async def close(self) -> None:
        """Ends all processes and drops the files."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError, BrokenError):
                await self._kill_shell()
            await self._end_holder(self._process)
            self._process = None
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._pipes is not None:
            self._pipes.close()
            self._pipes = None
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _begin(self, command: list[str]) -> None:
        """Starts the holder."""
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        with other:
            beginning = asyncio.create_task(
                asyncio.create_subprocess_exec(
                    *command,
                    stdin=other.fileno(),
                    stdout=other.fileno(),
                    stderr=other.fileno(),
                    start_new_session=True,
                )
            )
            try:
                self._process = await asyncio.shield(beginning)
            except asyncio.CancelledError:  # its number ends all that it has begun
                self._process = await beginning
                raise
        asyncio.get_running_loop().add_reader(self._socket, self._hear)
        async with asyncio.timeout(_SECONDS_TO_START):
            await self._news()

    async def _end_holder(self, holder: asyncio.subprocess.Process) -> None:
        """Lets the holder read the end of its input, and ends it if that does not."""
        seconds = self._kind.seconds_to_close()
        if self._socket is not None and seconds:
            with contextlib.suppress(OSError):  # it may have ended
                self._socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await holder.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        await holder.wait()

    def _start_shell(self) -> pipes_lib.Pipes:
        """Has the holder start an inner shell, whose pipes it returns."""
        assert self._socket is not None
        old, self._pipes = self._pipes, None
        if old is not None:
            old.close()
        owner, limit = self._kind.owner(), self._limits.output_bytes
        try:
            made = pipes_lib.Pipes(self._folder, owner, limit, self._listen)
            self._pipes = made
            self._socket.send(b"start\n")
        except OSError as error:
            raise BrokenError(f"the box has ended or gets no shell: {error}") from error
        self._is_alive = True
        self._watch_later()
        return made

    async def _kill_shell(self) -> None:
        """Ends the inner shell and all that it started."""
        async with asyncio.timeout(_SECONDS_TO_DIE):
            while self._is_alive:  # a shell that is only starting has no process yet
                self._kill_children()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SECONDS_TO_TRY):
                        await self._news()

    def _kill_children(self) -> None:
        assert self._process is not None
        assert self._socket is not None
        self._kind.kill(self._process.pid, self._socket.send)

    def _watch(self) -> None:
        """Ends all processes if they take too much memory; looks again later."""
        assert self._process is not None
        if not self._is_alive:
            return
        taken = self._kind.resident_bytes(self._process.pid)
        if taken > self._limits.resident_bytes:
            self._kill_children()
        self._watch_later()

    def _watch_later(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(_WATCH_SECONDS, self._watch)

    async def _news(self) -> int | None:
        """Returns the code of a command, or None when the holder has said something.

        Raises:
            BrokenError: the holder has ended.
        """
        self._waiter = asyncio.get_running_loop().create_future()
        return await self._waiter

    def _tell(self, news: int | BrokenError | None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if isinstance(news, BrokenError):
            self._waiter.set_exception(news)
        else:
            self._waiter.set_result(news)

    def _hear(self) -> None:
        """Takes what the holder says: that it is ready, or that a shell has ended."""
        assert self._socket is not None
        try:
            said = self._socket.recv(_MOST_HEARD)
        except BlockingIOError:
            return
        except ConnectionError:
            said = b""
        self._heard = (self._heard + said)[-_MOST_HEARD:]
        if not said:
            asyncio.get_running_loop().remove_reader(self._socket)
            why = self._heard.decode(errors="replace").strip()
            self._is_alive = False
            self._tell(BrokenError(f"the box has ended: {why}"))
        elif self._heard.endswith((_READY, _ENDED)):
            self._is_alive = self._is_busy = False
            self._heard = b""
            self._tell(None)

    def _listen(self, said: bytes) -> None:
        """Takes what the inner shell answers; if that is no code, a command did it."""
        self._answer = (self._answer + said)[: _MOST_HEARD + 1]
        is_long = len(self._answer) > _MOST_HEARD
        if is_long or (self._is_busy and b"\n" in said):
            found = _ANSWER.fullmatch(self._answer)
            if found is None:
                self._kill_children()
            else:
                self._is_busy = False
                self._tell(int(found[1]))


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
    shutil.rmtree(stage)  # no `await`: who is cancelled here has no box to close
    return box


def _allow_many_files() -> None:
    """Raises the soft limit of open files: a box has five."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
