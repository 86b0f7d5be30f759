"""Admits requests: checks keys and sizes, counts, and sees clients leave."""

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import hmac
import json
from collections.abc import Mapping
from typing import Any

from starlette import types

from glm5_jax.http_server import errors

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # names of this machine alone
_OPEN_PATHS = ("/health",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server allows a client."""

    api_key: str | None = None  # None: no key is needed
    max_body_bytes: int = 16 * 2**20
    max_concurrency: int = 256  # requests that are answered at the same time
    max_body_seconds: float = 30.0  # for a body to arrive
    max_stall_seconds: float = 60.0  # for a client to take a part of its answer
    # Whether only this machine may ask, by a name of its own; a page of the web that
    # another name leads here is refused.
    is_loopback: bool = True


class Guard:
    """ASGI middleware before all routes.

    Attributes:
        num_active: requests that are being answered.
        num_refused: requests that were refused because too many were active.
    """

    def __init__(self, app: types.ASGIApp, limits: Limits) -> None:
        """Guards `app`."""
        self._app, self._limits = app, limits
        self.num_active = self.num_refused = 0

    async def __call__(
        self, scope: types.Scope, receive: types.Receive, send: types.Send
    ) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_open = scope["path"] in _OPEN_PATHS
        with contextlib.ExitStack() as place:
            try:
                if not is_open:
                    self._admit(scope)
                    self._enter(place)  # before its body comes, as others' do meanwhile
                # Nobody shows a key there, so nobody's body is kept.
                body = b"" if is_open else await self._body(scope, receive)
            except errors.ApiError as error:
                await _answer(error, scope["path"], send)
                return
            if is_open:
                self._enter(place)
            await self._run(scope, receive, send, body, place)

    def _enter(self, place: contextlib.ExitStack) -> None:
        """Counts a request until its place is left."""
        self.num_active += 1
        place.callback(self._leave)

    def _leave(self) -> None:
        """Makes room for another request."""
        self.num_active -= 1

    def _admit(self, scope: types.Scope) -> None:
        """Raises ApiError if the request may not be answered now."""
        headers = _headers(scope)
        key = self._limits.api_key
        if key is not None and not any(
            hmac.compare_digest(given.encode(), key.encode())
            for given in _keys(headers)
        ):
            challenge = {"WWW-Authenticate": 'Basic realm="glm5_jax"'}
            raise errors.ApiError(
                401,
                "The key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                "invalid_api_key",
                challenge,
            )
        host = headers.get("host", "").rpartition(":")
        name = host[0] if host[2].isdigit() else headers.get("host", "")
        is_own = name.removeprefix("[").removesuffix("]") in LOOPBACK
        if key is None and self._limits.is_loopback and not is_own:
            raise errors.ApiError(
                403,
                f"Without --api_key this server answers only requests to localhost, "
                f"not to {name!r}.",
            )
        # Pages of other sites can send other types without asking; so no browser that
        # knows the key becomes their tool.
        is_json = headers.get("content-type", "").startswith("application/json")
        if scope["method"] == "POST" and not is_json:
            raise errors.ApiError(
                415, "Send the body as JSON, with Content-Type: application/json."
            )
        if self.num_active >= self._limits.max_concurrency:
            self.num_refused += 1
            raise errors.busy(
                f"The server answers {self._limits.max_concurrency} requests already; "
                f"try again later."
            )

    async def _body(self, scope: types.Scope, receive: types.Receive) -> bytes:
        """Returns the whole body.

        Raises:
            ApiError: it is too large, or does not arrive.
        """
        limit = self._limits.max_body_bytes
        declared = _headers(scope).get("content-length", "0")
        size = int(declared) if declared.isdigit() else 0
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.max_body_seconds):
                is_more = size <= limit
                while is_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise errors.ApiError(400, "The client left.")
                    body += message.get("body", b"")
                    size = max(size, len(body))
                    is_more = message.get("more_body", False) and size <= limit
        except TimeoutError:
            raise errors.ApiError(408, "The body did not arrive in time.") from None
        if size > limit:
            raise errors.ApiError(
                413, f"The body has more than {limit} bytes, the limit of this server."
            )
        return bytes(body)

    async def _run(
        self,
        scope: types.Scope,
        receive: types.Receive,
        send: types.Send,
        body: bytes,
        place: contextlib.ExitStack,
    ) -> None:
        """Runs the application; cancels it if the client leaves, or takes nothing.

        Args:
            scope: of the request.
            receive: the client's messages after the body.
            send: to the client.
            body: of the request.
            place: closed with the last part of the answer, after which the client may
                ask again at once.
        """
        is_gone, messages = asyncio.Event(), [body]

        async def replay() -> types.Message:
            if messages:
                return {"type": "http.request", "body": messages.pop()}
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            is_gone.set()

        async def hurried(message: types.Message) -> None:
            is_body = message["type"] == "http.response.body"
            if is_body and not message.get("more_body", False):
                place.close()
            try:
                async with asyncio.timeout(self._limits.max_stall_seconds):
                    await send(message)
            except TimeoutError:
                watcher.cancel()  # as if the client had left
                await asyncio.Event().wait()

        watcher = asyncio.ensure_future(watch())
        answer = asyncio.ensure_future(self._app(scope, replay, hurried))
        try:
            await asyncio.wait({answer, watcher}, return_when="FIRST_COMPLETED")
        finally:
            watcher.cancel()
            if not answer.done():
                answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer


async def _answer(error: errors.ApiError, path: str, send: types.Send) -> None:
    """Sends an error as JSON, and closes the connection."""
    body = json.dumps(error.body(path)).encode()
    headers = {"content-type": "application/json", "connection": "close"}
    headers |= {"content-length": str(len(body)), **error.headers}
    encoded = [(k.lower().encode(), v.encode()) for k, v in headers.items()]
    start: Any = {"type": "http.response.start", "status": error.status}
    await send({**start, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: types.Scope) -> Mapping[str, str]:
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}


def _keys(headers: Mapping[str, str]) -> list[str]:
    """Returns the keys that a request shows; a browser sends one as a password."""
    found = [headers.get("x-api-key", "")]
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        found.append(value)
    elif scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            found.append(base64.b64decode(value).decode().partition(":")[2])
    return found
