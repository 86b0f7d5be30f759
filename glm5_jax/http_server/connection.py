"""Drops clients that open a connection and do not finish the head of a request.

The guard sees a request only once its head is complete, so it cannot do this.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http import auto


def protocol(max_head_seconds: float) -> Callable[..., asyncio.Protocol]:
    """Returns uvicorn's protocol with a time limit for the head of each request."""

    class Connection(auto.AutoHTTPProtocol):
        """One connection of a client."""

        _timer: asyncio.TimerHandle | None = None
        cycle: Any
        transport: Any

        def connection_made(self, transport: Any) -> None:
            """Waits for the first request."""
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            """Reads a part of a request."""
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            """Ends the connection."""
            super().connection_lost(exc)
            self._forget()

        def _watch(self) -> None:
            """Starts the timer unless a request is being answered."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()
            elif self._timer is None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max_head_seconds, self._drop)

        def _drop(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def _forget(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection
