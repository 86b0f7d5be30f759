"""Implements the command route."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Sequence

import uvicorn
from absl import logging

from glm5_jax.http_server import guard, listening
from glm5_jax.serving.router import app

# What runs beside the server: it gets the router, and what ends the server.
Beside = Callable[
    [app.Router, Callable[[], None]], contextlib.AbstractAsyncContextManager
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the command.

    Attributes:
      host: address to listen at.
      port: number to listen at; 0 takes a free one.
      api_key: that clients must send; None asks for none.
      max_concurrency: requests that are answered at the same time.
      options: of the router.
      prefill_urls: addresses of replicas that read prompts for the others.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_concurrency: int = 1024
    options: app.Options = dataclasses.field(default_factory=app.Options)
    prefill_urls: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Checks that the router is not open to everybody.

        Raises:
          InputError: see `listening.require_key`.
        """
        listening.require_key(self.host, self.api_key)


def route(
    urls: Sequence[str], settings: Settings, beside: Beside | None = None
) -> None:
    """Routes requests until SIGTERM or ctrl-C.

    Args:
      urls: addresses of the replicas at the start.
      settings: of the command.
      beside: runs while the router does; None: nothing.

    Raises:
      InputError: an address cannot be used.
    """
    with contextlib.closing(listening.bind(settings.host, settings.port)) as listener:
        factory = uvicorn.Config("").get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run(listener, urls, settings, beside))


async def run(
    listener: socket.socket,
    urls: Sequence[str],
    settings: Settings,
    beside: Beside | None = None,
) -> None:
    """Routes requests that come to a socket; see `route`."""
    limits = guard.Limits(
        api_key=settings.api_key,
        max_concurrency=settings.max_concurrency,
        is_loopback=settings.host in guard.LOOPBACK,
    )
    router = app.Router(settings.options, limits)
    server = listening.make_server(router.door, int(settings.options.drain_seconds))

    def end() -> None:
        server.should_exit = True

    host, port = listener.getsockname()[:2]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(router.close)
        for url in urls:
            router.join(url)
        for url in settings.prefill_urls:
            router.join(url, is_prefill=True)
        if beside is not None:
            await stack.enter_async_context(beside(router, end))
        logging.info("Routing to %d replicas at http://%s:%d", len(urls), host, port)
        await server.serve(sockets=[listener])
