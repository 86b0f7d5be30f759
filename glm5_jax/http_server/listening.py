"""Listens at an address, and ends without cutting answers off. Imports no jax."""

import contextlib
import signal
import socket
import threading
import types
from collections.abc import Callable, Iterator

import uvicorn
from starlette import types as asgi

from glm5_jax import api_key as keys
from glm5_jax import config
from glm5_jax.http_server import connection, guard

MAX_HEAD_SECONDS = 30.0
# A connection without a request stays as long: clients that keep theirs for a shorter
# time, as most do, never ask on one that is being closed.
_IDLE_SECONDS = 30
_MAX_PORT = 2**16 - 1


class Server(uvicorn.Server):
    """A server that finishes the answers under way on SIGTERM or ctrl-C, then ends."""

    def __init__(
        self, settings: uvicorn.Config, on_signal: Callable[[], None] | None
    ) -> None:
        """Takes uvicorn's settings, and what the first signal calls instead."""
        super().__init__(settings)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
        """Handles a signal."""
        on_signal, self._on_signal = self._on_signal, None
        if on_signal is None:
            super().handle_exit(sig, frame)
        else:
            on_signal()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals while it lasts; threads but the main one get none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {n: signal.signal(n, self.handle_exit) for n in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_server(
    app: asgi.ASGIApp,
    drain_seconds: int,
    max_head_seconds: float = MAX_HEAD_SECONDS,
    on_signal: Callable[[], None] | None = None,
) -> Server:
    """Returns the HTTP server of an application; its `run` takes the sockets.

    Args:
      app: the application.
      drain_seconds: for answers under way, at the end.
      max_head_seconds: for the head of a request to arrive.
      on_signal: called on the first SIGTERM or ctrl-C instead of ending; it must not
        block. A second signal ends.
    """
    settings = uvicorn.Config(
        app,
        http=connection.protocol(max_head_seconds),  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
    )
    return Server(settings, on_signal)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket with an address, at which it does not listen yet.

    Raises:
      InputError: the address cannot be used.
    """
    if not 0 <= port <= _MAX_PORT:
        raise config.InputError(f"--port must lie in 0..{_MAX_PORT}, got {port}.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sets TCP_NODELAY only where the protocol is named; without it every
        # event of a stream may wait 40 ms for the acknowledgement of the last one.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:  # the latter of a name that is none
        raise _unusable(host, port, error) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _unusable(host, port, error) from error
    return bound


def require_key(host: str, api_key: str | None) -> None:
    """Checks that a server is not open to everybody.

    Raises:
      InputError: other machines may ask without a key, or the key is empty, or one
        that no header holds.
    """
    if api_key is not None and not api_key.strip():
        raise config.InputError("--api_key is empty; give a key, or leave it out.")
    if api_key is not None:
        keys.checked(api_key, "--api_key")
    if api_key is None and host not in guard.LOOPBACK:
        raise config.InputError(
            f"--host={host} lets other machines ask, so --api_key must be set; or "
            f"listen at 127.0.0.1."
        )


def _unusable(host: str, port: int, error: Exception) -> config.InputError:
    return config.InputError(
        f"--host={host} --port={port} cannot be used: {error}; give others, or "
        f"--port=0 for any free one."
    )
