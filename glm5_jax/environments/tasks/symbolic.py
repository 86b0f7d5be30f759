"""Equality of answers that are expressions: exact where possible, else math-verify.

maths.py decides what it can, in microseconds. What it finds unequal is asked of
math-verify, an extra, in a pool of processes: a comparison that takes too long ends
with its process, and counts as unequal.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import pathlib
import queue
import re
import select
import subprocess
import sys
import time

from glm5_jax import config
from glm5_jax.environments.tasks import maths

SECONDS = 5.0  # of a comparison
_SECONDS_TO_START = 60.0  # sympy takes some
_MAX_CHARACTERS = 4000  # read from the end of an answer
# math-verify works these out, so that a question repeated would be its own answer.
_WORK = re.compile(
    r"\\(?:int|sum|prod|lim)(?![a-z])"
    r"|\\[dt]?frac\s*\{?\s*(?:\\mathrm\s*\{?\s*d|d|\\partial)"
)


class Pool:
    """Processes that compare; each does one comparison at a time."""

    def __init__(
        self, num_processes: int | None = None, seconds: float = SECONDS
    ) -> None:
        """Makes a pool that starts its processes as they are needed.

        Args:
            num_processes: at most; None: as many as cores.
            seconds: of a comparison.

        Raises:
            config.InputError: the extra is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise config.InputError(
                "Answers that are expressions need the extra: pip install "
                "'glm5_jax[math_verify]'."
            )
        self._seconds = seconds
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_processes or os.cpu_count() or 1):
            self._free.put(None)
        atexit.register(self.close)

    def is_equal(self, reference: str, given: object) -> bool:
        r"""Tells whether an answer is equal to the reference; waits for a process.

        Args:
            reference: the right answer, in LaTeX.
            given: the answer to check, a text or LaTeX with \boxed. A value that is no
                string is wrong, and so is work left to do, such as a derivative.
        """
        if not isinstance(given, str) or not given.strip():
            return False
        if maths.is_equal(reference, given):
            return True
        answer = maths.boxed(given[-_MAX_CHARACTERS:])
        given = given[-_MAX_CHARACTERS:] if answer is None else f"\\boxed{{{answer}}}"
        if _WORK.search(given) and not _WORK.search(reference):
            return False
        worker = self._free.get()
        try:
            if worker is None:
                worker = _Worker()
            said = worker.ask([reference, given], self._seconds)
            if said is None:
                worker.end()
                worker = None
        except BaseException:
            if worker is not None:
                worker.end()
            worker = None
            raise
        finally:
            self._free.put(worker)
        return said is True

    def close(self) -> None:
        """Ends the processes that are idle."""
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self._free.get_nowait()
                if worker is not None:
                    worker.end()


class _Worker:
    """A process that compares."""

    def __init__(self) -> None:
        script = pathlib.Path(__file__).with_name("symbolic_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._line(_SECONDS_TO_START) != b"ready\n":
            self.end()
            raise RuntimeError("the process that compares expressions did not start")

    def ask(self, pair: list[str], seconds: float) -> bool | None:
        """Returns whether a pair is equal; None: the process must end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._line(seconds)
        return json.loads(line) if line.endswith(b"\n") else None

    def end(self) -> None:
        """Kills the process."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        self._process.wait()

    def _line(self, seconds: float) -> bytes:
        """Returns the next line, or less if it does not come in time."""
        assert self._process.stdout is not None
        descriptor, line = self._process.stdout.fileno(), b""
        ends = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            rest = max(ends - time.monotonic(), 0.0)
            if not select.select([descriptor], [], [], rest)[0]:
                return line
            chunk = os.read(descriptor, 4096)
            if not chunk:
                return line
            line += chunk
        return line
