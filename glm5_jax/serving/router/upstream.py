"""Speaks HTTP with the replicas."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from glm5_jax import api_key as keys

# Idle connections are closed before a server does so (ours after 30 s, uvicorn's of
# others after 5 s), or a request could meet a closed one.
_IDLE_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
# They belong to one connection, or are the router's business.
_DROPPED = frozenset(
    (
        *("accept-encoding", "content-length", "expect", "host"),
        *("authorization", "cookie", "x-api-key"),
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authenticate", "proxy-authorization"),
    )
)
# What a request to a replica that does not answer raises.
FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A replica's whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Returns whether the replica did what it was asked for."""
        return 200 <= self.status < 300

    @property
    def json(self) -> Any:
        """Returns the body; a text if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return self.body.decode("utf-8", "replace")


class Upstream:
    """Connections to the replicas, which share one key."""

    def __init__(self, api_key: str | None) -> None:
        """Opens nothing; a running event loop is needed."""
        self._key = keys.header(api_key)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()

    def open(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes
    ) -> Any:
        """Returns a context of aiohttp's response; leaving it early ends the answer.

        Args:
          method: of HTTP.
          url: with path and query.
          headers: of the client; those of its connection and its key are left out.
          body: whole.
        """
        return self._session.request(
            method,
            url,
            headers={**passed(headers), "accept-encoding": "identity", **self._key},
            data=body or None,
            allow_redirects=False,
        )

    async def ask(
        self, method: str, url: str, seconds: float, body: bytes = b""
    ) -> Answer:
        """Returns the whole answer to a request of the router itself.

        Raises:
          one of FAILURES: there is none in time.
        """
        headers = {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(seconds),
            self.open(method, url, headers, body) as found,
        ):
            content = await found.read()
            return Answer(found.status, passed(found.headers), content)


def passed(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers that a router passes on, with names in lower case."""
    lower = {name.lower(): value for name, value in headers.items()}
    return {name: value for name, value in lower.items() if name not in _DROPPED}
