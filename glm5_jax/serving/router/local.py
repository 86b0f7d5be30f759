"""Starts servers on this machine, and a router before them. Imports no jax."""

import asyncio
import contextlib
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from absl import logging

from glm5_jax import api_key, config
from glm5_jax.http_server import listening, reach
from glm5_jax.processes import simulate
from glm5_jax.serving import for_prefill
from glm5_jax.serving.router import app, command, pool

_WRONG_INPUT = 2  # exit code of a server that starting again does not help
_LAST_LINES = 20  # that are shown of a server that ended
_POLL_SECONDS = 0.1
# Seconds before a server that ended starts again, first and later.
_MIN_DELAY, _MAX_DELAY = 1.0, 60.0
# Out of service though its process goes on, so it hangs; the router has broken its
# requests by then.
_HUNG_SECONDS = 120.0
_GRACE_SECONDS = 10.0  # for a server to end, beyond its answers
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Servers:
    """Servers of one model as processes of this machine, started again if they end.

    A server that has answered and hangs is ended.

    Attributes:
      failure: why the servers cannot run; None as long as they may.
      processes: by number; a later one takes the place of one that ended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environs: Sequence[Mapping[str, str]],
        cores: Sequence[set[int]],
        folder: pathlib.Path,
        num_prefill: int = 0,
    ) -> None:
        """Starts nothing yet, and chooses the ports.

        Args:
          arguments: the command, without --port.
          environs: the environment of each server.
          cores: of each server.
          folder: for their logs.
          num_prefill: servers, the last ones, that read prompts for the others.
        """
        self.failure: str | None = None
        self.processes: dict[int, subprocess.Popen] = {}
        self._arguments, self._environs = arguments, environs
        self._cores, self._folder = cores, folder
        with contextlib.ExitStack() as stack:  # so that all ports differ
            free = [
                stack.enter_context(contextlib.closing(listening.bind("127.0.0.1", 0)))
                for _ in environs
            ]
            self._ports = [one.getsockname()[1] for one in free]
        self._num_answering = len(environs) - num_prefill

    @contextlib.asynccontextmanager
    async def beside(
        self, router: app.Router, end: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Keeps the servers running beside a router; calls `end` if they cannot."""
        keepers = [
            asyncio.create_task(self._keep(index, router, end))
            for index in range(len(self._environs))
        ]
        try:
            yield
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop()

    async def _keep(
        self, index: int, router: app.Router, end: Callable[[], None]
    ) -> None:
        """Starts one server, again after it has ended."""
        loop, delay = asyncio.get_running_loop(), _MIN_DELAY
        path = self._folder / f"replica_{index}.log"
        is_prefill, was_ready = index >= self._num_answering, False
        replica = router.join(_url(self._ports[index]), is_prefill=is_prefill)
        while True:
            begun = loop.time()
            child = self._start(index, path)
            was_ready |= await _watched(child, replica)
            code = child.poll()
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            shown = "\n".join(lines[-_LAST_LINES:])
            if code == _WRONG_INPUT and not was_ready:
                self.failure = shown
                end()
                return
            if loop.time() - begun > _MAX_DELAY:
                delay = _MIN_DELAY
            logging.warning(
                "Replica %d ended with code %d and starts again in %g s; its last "
                "lines, of %s:\n%s",
                index,
                code,
                delay,
                path,
                shown,
            )
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY)

    def _start(self, index: int, path: pathlib.Path) -> subprocess.Popen:
        port, prefill = self._ports[index], self._ports[self._num_answering :]
        command_line = [*self._arguments, f"--port={port}"]
        if prefill:
            urls = map(_url, prefill if index < self._num_answering else ())
            command_line.append(f"--prefill_servers={','.join(urls)}")
        child = simulate.start(command_line, self._environs[index], path)
        if self._cores[index]:
            with contextlib.suppress(OSError):  # it may have ended
                os.sched_setaffinity(child.pid, self._cores[index])
        self.processes[index] = child
        logging.info("Replica %d is process %d at port %d.", index, child.pid, port)
        return child

    async def _stop(self) -> None:
        """Ends the servers; they finish what they answer directly."""
        for child in self.processes.values():
            child.terminate()
        deadline = asyncio.get_running_loop().time() + _GRACE_SECONDS
        for child in self.processes.values():
            while child.poll() is None:
                if asyncio.get_running_loop().time() > deadline:
                    child.kill()
                await asyncio.sleep(_POLL_SECONDS)


async def _watched(child: subprocess.Popen, replica: pool.Replica) -> bool:
    """Waits for a server's end, also of one that hangs; True if it was in service."""
    loop, was_ready = asyncio.get_running_loop(), False
    well = loop.time()  # as it was last seen so
    while child.poll() is None:
        was_ready |= replica.state == pool.State.READY
        if not was_ready or replica.state != pool.State.DOWN:
            well = loop.time()
        elif loop.time() - well > _HUNG_SECONDS:
            logging.error(
                "%s is ended, and starts again: it has been out of service for %g s, "
                "and its process goes on. %s",
                replica.url,
                _HUNG_SECONDS,
                replica.reason,
            )
            child.kill()
            well = loop.time()
        await asyncio.sleep(_POLL_SECONDS)
    return was_ready


def serve(number: int, max_concurrency: int) -> None:
    """Serves what the command line says by several processes, until SIGTERM or ctrl-C.

    Args:
      number: of servers that answer; --num_prefill_replicas others read prompts.
      max_concurrency: requests that each answers at the same time.

    Raises:
      InputError: no server answers, the devices cannot be divided, or the servers
        refuse their input.
    """
    num_prefill = for_prefill.NUM_PREFILL_REPLICAS.value
    if not number:
        raise config.InputError(
            f"--num_prefill_replicas={num_prefill} needs --num_replicas, the number of "
            f"servers that answer."
        )
    every = number + num_prefill
    key = reach.api_key()
    seconds = float(reach.DRAIN_SECONDS.value)
    settings = command.Settings(
        host=reach.HOST.value,
        port=reach.PORT.value,
        api_key=key,
        max_concurrency=number * max_concurrency,
        options=app.Options(replica_key=key, drain_seconds=seconds, max_wait=math.inf),
    )
    arguments = [sys.executable, *sys.orig_argv[1:]]
    arguments += ["--num_replicas=0", "--num_prefill_replicas=0", "--host=127.0.0.1"]
    environ = {**os.environ, **({api_key.VARIABLE: key} if key else {})}
    folder = pathlib.Path(tempfile.mkdtemp(prefix="glm5_jax_replicas_"))
    logging.info("The logs of the replicas are in %s", folder)
    servers = Servers(
        arguments,
        [environ | part for part in gpus_of(every, environ)],
        cores_of(every),
        folder,
        num_prefill,
    )
    command.route([], settings, servers.beside)
    if servers.failure is not None:
        raise config.InputError(servers.failure)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def cores_of(number: int) -> list[set[int]]:
    """Returns equal shares of this process's cores; empty ones where it has too few."""
    if not hasattr(os, "sched_getaffinity"):
        return [set()] * number
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // number
    return [set(cores[i * each : (i + 1) * each]) for i in range(number)]


def gpus_of(
    number: int,
    environ: Mapping[str, str],
    devices: pathlib.Path = pathlib.Path("/dev"),
) -> list[dict[str, str]]:
    """Returns what gives each server its share of the GPUs; nothing without any.

    Args:
      number: of servers.
      environ: may name the GPUs to use.
      devices: folder of the devices.

    Raises:
      InputError: they cannot be divided.
    """
    if environ.get("JAX_PLATFORMS") == "cpu":
        return [{}] * number
    if any(devices.glob("accel[0-9]*")):
        raise config.InputError(
            "--num_replicas divides CPUs and GPUs, and this machine has TPUs; start a "
            "server for each part of them, and python -m glm5_jax.route before them."
        )
    found = sorted(devices.glob("nvidia[0-9]*"), key=lambda p: int(p.name[6:]))
    names = [path.name.removeprefix("nvidia") for path in found]
    if _VISIBLE in environ:
        names = [name for name in re.split(r"\s*,\s*", environ[_VISIBLE]) if name]
    if not names:
        return [{}] * number
    each = len(names) // number
    if each * number != len(names):
        raise config.InputError(
            f"--num_replicas must divide the {len(names)} GPUs, got {number}; name the "
            f"ones to use in {_VISIBLE}."
        )
    shares = [names[i * each : (i + 1) * each] for i in range(number)]
    return [{_VISIBLE: ",".join(share)} for share in shares]
