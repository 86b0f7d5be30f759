"""Simulates several hosts: real processes on this machine, joined by jax.distributed.

It serves tests, and the search for faults of several hosts without them. They
communicate over loopback with gloo, so that their speed says nothing about a cluster.
Imports no jax.
"""

import contextlib
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from glm5_jax import config as config_lib
from glm5_jax.processes import folder_lock, group

MAX_PROCESSES = 64  # each is a whole Python with jax
LOGS = "logs"  # folder in the run's folder, with process_0.log, ...
_LAST_LINES = 20  # lines that are shown of the process that failed
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0  # time for the others to notice that one has failed
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
# A program that becomes another one, which gets SIGKILL when its parent dies (1 is
# PR_SET_PDEATHSIG). The parent cannot ask for that after a fork: it has jax's threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def run(config: config_lib.TrainConfig, workdir: pathlib.Path, count: int) -> int:
    """Restarts this program as `count` processes, and shows the output of process 0.

    The processes get equal parts of the mesh's devices; mesh.data=-1 takes the fewest
    possible.

    Returns:
      The exit code: that of the first process that failed, or 0.

    Raises:
      InputError: the mesh has no whole share for each process, or asks for what
        several processes cannot do; another process runs in the folder.
    """
    me = group.Group(num_processes=count)
    group.require_supported(config, me if count > 1 else None)
    environ = _environ(devices_each(config.mesh, count))
    logs = workdir.expanduser() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    with folder_lock.held(logs.parent):  # else their logs would be overwritten
        pass
    return _together(environ, logs, count, f"--workdir={workdir}")


def run_command(mesh: config_lib.MeshConfig, count: int) -> int:
    """Restarts this program as `count` processes, the first in place of this one.

    The first has this program's input and output. The output of the others is shown if
    they fail.

    Returns:
      The exit code: that of the first process that failed, or 0.

    Raises:
      InputError: the mesh has no whole share for each process.
    """
    environ = _environ(devices_each(mesh, count))
    with tempfile.TemporaryDirectory(prefix="glm5_jax_") as logs:
        return _together(environ, pathlib.Path(logs), count, shows_first=True)


def _together(
    environ: Mapping[str, str],
    logs: pathlib.Path,
    count: int,
    *more: str,
    shows_first: bool = False,
) -> int:
    """Starts this program's processes, and waits for their end.

    Args:
      environ: of each process.
      logs: folder for their output.
      count: of processes.
      *more: flags besides those of the command line.
      shows_first: whether process 0 writes to this program's output, not to a log.
    """
    paths = [logs / f"process_{number}.log" for number in range(count)]
    if shows_first:
        paths[0] = pathlib.Path(os.devnull)
    address = f"127.0.0.1:{_free_port()}"
    children = []
    for number, path in enumerate(paths):
        flags = [f"--coordinator={address}", f"--num_processes={count}"]
        flags += [f"--process_id={number}", "--simulate_processes=0", *more]
        command = [sys.executable, *sys.orig_argv[1:], *flags]
        shown = shows_first and number == 0
        children.append(start(command, environ, None if shown else path))
    try:
        with _passed_on(children):
            return _watch(children, paths)
    except KeyboardInterrupt:
        return 130
    finally:
        _signal(children, "KILL")


def start(
    command: Sequence[str], environ: Mapping[str, str], path: pathlib.Path | None
) -> subprocess.Popen:
    """Starts a process that writes to a log, and on Linux dies with this one.

    Args:
      command: program and arguments.
      environ: its environment.
      path: file of the log; None shares this program's output.
    """
    if sys.platform == "linux":
        bound = [sys.executable, "-E", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        command = [*bound, *command]
    with contextlib.ExitStack() as stack:
        log = None if path is None else stack.enter_context(path.open("wb"))
        return subprocess.Popen(
            command,
            env=environ,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,  # ctrl-C comes to us alone
        )


def devices_each(mesh: config_lib.MeshConfig, count: int) -> int:
    """Returns the number of devices of each of `count` processes.

    Raises:
      InputError: it is not a whole number.
    """
    if not 1 <= count <= MAX_PROCESSES:
        raise config_lib.InputError(
            f"--simulate_processes must be at least 1 and at most {MAX_PROCESSES}, "
            f"got {count}."
        )
    fixed = mesh.fsdp * mesh.expert * mesh.tensor * mesh.context
    total = fixed * mesh.data
    if mesh.data == -1:
        total = math.lcm(fixed * mesh.slices, count)
    if total % count:
        raise config_lib.InputError(
            f"--simulate_processes must divide the {total} devices of the mesh, got "
            f"{count}; set --config.mesh.data=-1, or another number of processes."
        )
    return total // count


def _environ(num_devices: int) -> dict[str, str]:
    """Returns the environment of the processes: a CPU split into devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        **os.environ,
        "XLA_FLAGS": " ".join(f for f in flags if not f.startswith(_DEVICE_COUNT)),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONUNBUFFERED": "1",
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _watch(children: Sequence[subprocess.Popen], paths: Sequence[pathlib.Path]) -> int:
    """Shows the log of process 0 until all processes have ended or one has failed."""
    failed, deadline = None, math.inf
    with paths[0].open("r", encoding="utf-8", errors="replace") as log:
        while True:
            codes = [child.poll() for child in children]
            if text := log.read():
                sys.stdout.write(text)
                sys.stdout.flush()
            if failed is None and any(codes):
                failed = next(i for i, code in enumerate(codes) if code)
                deadline = time.monotonic() + _GRACE_SECONDS
            if None not in codes or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
    if failed is None:
        return 0
    code = int(children[failed].returncode)
    if failed:  # the lines of process 0 are there already
        lines = paths[failed].read_text(encoding="utf-8", errors="replace").splitlines()
        sys.stderr.write(
            f"process {failed} ended with code {code}; its last lines, of "
            f"{paths[failed]}:\n" + "\n".join(lines[-_LAST_LINES:]) + "\n"
        )
    return code if code > 0 else 128 - code  # a signal, as shells have it


@contextlib.contextmanager
def _passed_on(children: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Passes SIGTERM and a first ctrl-C to the children, so that they save and end."""

    def ask(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _signal(children, "TERM")

    names = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(name, ask) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)


def _signal(children: Sequence[subprocess.Popen], name: str) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(getattr(signal, f"SIG{name}"))
