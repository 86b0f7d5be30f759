"""Passes a request to a replica, and to another one where that fails in time."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from absl import logging
from starlette import types

from glm5_jax.http_server import errors
from glm5_jax.serving import sse
from glm5_jax.serving.router import events, session, upstream
from glm5_jax.serving.router import pool as pool_lib

# Another replica may do better. 401 and 403: this one refuses the router's key. 409: it
# has another version of the weights than the request wants. 504 is passed on: the
# request has used all of its time.
_REFUSALS = frozenset((401, 403, 409, 429, 500, 502, 503))
_MAX_BREAKS = 2  # a request that ends a replica must not end all of them


@dataclasses.dataclass(frozen=True)
class Request:
    """A client's request, whole."""

    method: str
    path: str
    target: str  # path and query
    headers: Mapping[str, str]  # names in lower case
    body: bytes


@dataclasses.dataclass(frozen=True)
class Broken:
    """A replica that was lost before the client had a byte."""

    reason: str


class Forward:
    """The ASGI application that forwards every request.

    Attributes:
      num_retries: requests that were sent to another replica.
      num_broken: streams that ended with an error because their replica was lost.
    """

    def __init__(self, pool: pool_lib.Pool, link: upstream.Upstream) -> None:
        """Forwards to the replicas of `pool`."""
        self._pool, self._link = pool, link
        self.num_retries = self.num_broken = 0

    async def __call__(
        self, scope: types.Scope, receive: types.Receive, send: types.Send
    ) -> None:
        """Answers one request.

        Raises:
          ApiError: no replica could answer.
        """
        request = await _read(scope, receive)
        key = session.key_of(request.headers, request.body)
        refused: dict[str, upstream.Answer | Broken] = {}
        while True:
            replica = await self._pool.choose(key, refused)
            if replica is None:
                break
            self.num_retries += bool(refused)
            refusal = await self._attempt(replica, request, send)
            if refusal is None:
                return
            refused[replica.url] = refusal
            breaks = [r for r in refused.values() if isinstance(r, Broken)]
            if len(breaks) >= _MAX_BREAKS:
                break
        await _send_whole(_best([*refused.values()], request.path), send)

    async def _attempt(
        self, replica: pool_lib.Replica, request: Request, send: types.Send
    ) -> upstream.Answer | Broken | None:
        """Returns why the replica did not answer; None if the client has its answer."""
        outcome: upstream.Answer | Broken | None = None
        try:
            with replica.working():
                outcome = await self._answer(replica, request, send)
        except upstream.FAILURES as error:
            outcome = Broken(str(error) or type(error).__name__)
            replica.answered["broken"] += 1
            if isinstance(error, aiohttp.ClientConnectorError):
                down = f"refuses connections: {error.strerror}"
                await self._pool.change(replica, pool_lib.State.DOWN, down)
            logging.warning("%s: %s", replica.url, outcome.reason)
        except asyncio.CancelledError:
            replica.answered["cancelled"] += 1
            raise
        return outcome

    async def _answer(
        self, replica: pool_lib.Replica, request: Request, send: types.Send
    ) -> upstream.Answer | None:
        """Sends the replica's answer to the client; returns it if it is a refusal.

        Raises:
          one of FAILURES: the replica was lost before the client had a byte.
        """
        url = replica.url + request.target
        opened = self._link.open(request.method, url, request.headers, request.body)
        async with contextlib.AsyncExitStack() as stack:
            async with replica.until_cut_off():
                found = await stack.enter_async_context(opened)
                headers = {**upstream.passed(found.headers), "x-replica": replica.url}
                kind = found.headers.get("Content-Type", "")
                is_stream = kind.startswith("text/event-stream")
                body = b"" if is_stream else await found.read()
            if is_stream:
                await self._stream(replica, request, found, headers, send)
                return None
            answer = upstream.Answer(found.status, headers, body)
        replica.answered[str(answer.status)] += 1
        if answer.status in _REFUSALS:
            return answer
        await _send_whole(answer, send)
        return None

    async def _stream(
        self,
        replica: pool_lib.Replica,
        request: Request,
        found: aiohttp.ClientResponse,
        headers: Mapping[str, str],
        send: types.Send,
    ) -> None:
        """Passes events on as they come; a loss becomes the last one.

        Raises:
          one of FAILURES: the replica was lost before it sampled a token.
        """
        whole, opening, is_begun = events.Events(), b"", False
        try:
            async with replica.until_cut_off():
                async for part in found.content.iter_any():
                    ended = whole.feed(part)
                    if not is_begun:
                        opening += ended
                        if events.is_opening(opening):
                            continue
                        ended, is_begun = opening, True
                        await _begin(found.status, headers, send)
                    if ended:
                        await send(_piece(ended, True))
        except upstream.FAILURES as error:
            if not is_begun:
                raise
            self.num_broken += 1
            replica.answered["broken"] += 1
            logging.warning("%s: a stream broke: %s", replica.url, error)
            lost = errors.ApiError(
                502, "The replica that answered was lost; send the request again."
            )
            text = sse.error_event(lost, request.path)
            await send(_piece(text.encode(), False))
            return
        if not is_begun:
            await _begin(found.status, headers, send)
        replica.answered["200"] += 1
        rest = whole.close()
        await send(_piece(rest if is_begun else opening + rest, False))


async def _read(scope: types.Scope, receive: types.Receive) -> Request:
    """Returns the request; the guard has it whole."""
    body, is_more = b"", True
    while is_more:
        message = await receive()
        body += message.get("body", b"")
        is_more = message.get("more_body", False)
    raw = scope.get("raw_path") or scope["path"].encode()
    target = raw.split(b"?")[0]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
    return Request(
        scope["method"], scope["path"], target.decode("latin-1"), headers, body
    )


def _best(refusals: list[upstream.Answer | Broken], path: str) -> upstream.Answer:
    """Returns the answer to a request that all replicas refused, or broke at.

    Where one was only busy the client may try again; else it gets the last error.
    """
    answers = [r for r in refusals if isinstance(r, upstream.Answer)]
    for status in (429, 503):
        if found := [a for a in answers if a.status == status]:
            return min(found, key=_retry_after)
    error = errors.ApiError(
        502, "The replica was lost before it answered; send the request again."
    )
    if answers:
        last = answers[-1]
        if last.status not in (401, 403):
            return last
        error = errors.ApiError(
            502, "The replicas refuse the router's key; see GET /replicas."
        )
    body = json.dumps(error.body(path)).encode()
    return upstream.Answer(error.status, {"content-type": "application/json"}, body)


def _retry_after(answer: upstream.Answer) -> float:
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdigit() else float("inf")


async def _send_whole(answer: upstream.Answer, send: types.Send) -> None:
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    await _begin(answer.status, headers, send)
    await send(_piece(answer.body, False))


async def _begin(status: int, headers: Mapping[str, str], send: types.Send) -> None:
    encoded = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]
    start: Any = {"type": "http.response.start", "status": status}
    await send({**start, "headers": encoded})


def _piece(body: bytes, is_more: bool) -> Any:
    return {"type": "http.response.body", "body": body, "more_body": is_more}
