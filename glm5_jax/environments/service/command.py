"""Implements `serve`: listens, and lets episodes under way end before it does."""

import asyncio
import contextlib
import dataclasses
import socket

import uvicorn
from absl import logging

from glm5_jax import config, environments
from glm5_jax.config import checks
from glm5_jax.environments import context, protocol, threads, wrapped
from glm5_jax.environments.service import app, live
from glm5_jax.http_server import guard, listening

_POLL_SECONDS = 0.05
_LAST_SECONDS = 1  # for answers under way, after all episodes have ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a service.

    Attributes:
        host: address to listen at.
        port: number to listen at; 0 takes a free one.
        api_key: that clients must send; None asks for none.
        limits: of the episodes.
        max_body_bytes: of a request.
        drain_seconds: for episodes under way, after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    limits: live.Limits = dataclasses.field(default_factory=live.Limits)
    max_body_bytes: int = 2**22
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Checks that the service is not open to everybody.

        Raises:
            config.InputError: see `listening.require_key`; or a size is not positive.
        """
        listening.require_key(self.host, self.api_key)
        checks.require(*checks.positive(self, "max_body_bytes"))


def serve(name: str, settings: Settings) -> None:
    """Serves a taskset until SIGTERM or ctrl-C.

    Args:
        name: of the taskset, as rl.environment.
        settings: of the service.

    Raises:
        config.InputError: there is no such taskset, it cannot be served, or the address
            cannot be used.
    """
    taskset = made(name)
    with contextlib.closing(listening.bind(settings.host, settings.port)) as listener:
        factory = uvicorn.Config("").get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(Service(taskset, settings).run(listener))
    if close := getattr(taskset, "close", None):
        close()


def made(name: str) -> protocol.Taskset:
    """Returns a taskset that can be served.

    Raises:
        config.InputError: it does not exist, programs play its episodes, or it decides
            what the model sees, which is the client's part.
    """
    taskset = environments.make(name)
    if protocol.has_agents(taskset):
        raise config.InputError(
            f"{name!r} has tasks that are played by programs of their own, which ask "
            f"for the model's turns by themselves; it cannot be served."
        )
    if any(_is_editor(part.environment()) for part in protocol.parts(taskset)):
        raise config.InputError(
            f"{name!r} decides what the model sees of an episode, which a service "
            f"cannot; serve what it wraps, and let clients take "
            f"{context.PREFIX}KEPT:http://HOST:PORT."
        )
    return taskset


def _is_editor(environment: object) -> bool:
    """Returns whether an environment, or one in it, decides what the model sees."""
    if isinstance(environment, protocol.Editor):
        return True
    is_around = isinstance(environment, wrapped.WrappedEpisode)
    return is_around and _is_editor(environment.inner)


class Service:
    """A service; it plays episodes while `run` does.

    Attributes:
        episodes: that are under way.
    """

    def __init__(self, taskset: protocol.Taskset, settings: Settings) -> None:
        """Makes the routes.

        Args:
            taskset: that is served.
            settings: of the service.
        """
        self._name, self._drain_seconds = taskset.name, settings.drain_seconds
        self.episodes = live.Episodes(taskset, settings.limits)
        limits = guard.Limits(
            api_key=settings.api_key,
            max_body_bytes=settings.max_body_bytes,
            # A request of each episode, and as many that only look.
            max_concurrency=2 * settings.limits.max_episodes + 16,
            is_loopback=settings.host in guard.LOOPBACK,
        )
        door = app.App(taskset, self.episodes, limits).door
        self._server = listening.make_server(
            door, _LAST_SECONDS, on_signal=self.episodes.drain
        )

    async def run(self, listener: socket.socket) -> None:
        """Serves at a socket until the episodes are told to drain, and have."""
        host, port = listener.getsockname()[:2]
        logging.info("Serving %s at http://%s:%d", self._name, host, port)
        asyncio.get_running_loop().set_default_executor(threads.Threads())
        ending = asyncio.create_task(self._end())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            ending.cancel()
            await self.episodes.close()

    async def _end(self) -> None:
        """Ends the server once no episode is left, or the time for them is over."""
        while not self.episodes.is_draining:
            await asyncio.sleep(_POLL_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                while len(self.episodes):
                    await asyncio.sleep(_POLL_SECONDS)
        self._server.should_exit = True
