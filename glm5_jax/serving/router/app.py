"""Joins the routes of the router."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from starlette import applications, requests, responses, routing

from glm5_jax import config
from glm5_jax.http_server import errors, guard
from glm5_jax.serving.router import (
    balance,
    everyone,
    forward,
    health,
    metrics,
    upstream,
)
from glm5_jax.serving.router import pool as pool_lib

_METRICS_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a router.

    Attributes:
      replica_key: that the replicas ask for.
      bound: of a replica's requests.
      checks: how replicas are watched.
      max_wait: seconds that a request waits while no replica is in service.
      everyone_seconds: for each replica's answer to a pause or an update of weights.
      drain_seconds: for the answers of a replica that leaves.
    """

    replica_key: str | None = None
    bound: balance.Bound = dataclasses.field(default_factory=balance.Bound)
    checks: health.Checks = dataclasses.field(default_factory=health.Checks)
    max_wait: float = 10.0
    everyone_seconds: float = 600.0
    drain_seconds: float = 60.0


class Router:
    """The router; its attribute `door` is the ASGI application.

    Attributes:
      pool: the replicas.
      door: all routes, behind key and limits.
    """

    def __init__(self, options: Options, limits: guard.Limits) -> None:
        """Makes a router without replicas; a running event loop is needed."""
        self._options = options
        self.pool = pool_lib.Pool(options.bound, options.max_wait)
        self._link = upstream.Upstream(options.replica_key)
        self._health = health.Health(self.pool, self._link, options.checks)
        self._forward = forward.Forward(self.pool, self._link)
        self.door = guard.Guard(self._routes(), limits)

    async def close(self) -> None:
        """Ends the checks and the connections."""
        await self._health.close()
        await self._link.close()

    def join(
        self, url: str, is_trusted: bool = False, is_prefill: bool = False
    ) -> pool_lib.Replica:
        """Adds a replica; it gets requests once it answers.

        Args:
          url: its address.
          is_trusted: see `pool.Replica`.
          is_prefill: see `pool.Replica`.

        Raises:
          InputError: the address is none.
        """
        replica = self.pool.join(url, is_prefill)
        replica.is_trusted |= is_trusted
        self._health.watch(replica)
        return replica

    async def leave(self, replica: pool_lib.Replica, seconds: float) -> int:
        """Removes a replica once its answers are out; returns how many were cut off.

        Args:
          replica: gets no request from now on.
          seconds: for its answers.
        """
        await self.pool.change(replica, pool_lib.State.LEAVING, "was told to leave")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while replica.load and loop.time() < deadline:
            await asyncio.sleep(0.05)
        await self._health.forget(replica)
        self.pool.drop(replica)
        return replica.cut_off()

    def _routes(self) -> applications.Starlette:
        route = routing.Route
        to_all = [
            route(path, self._ask_everyone, methods=["POST"])
            for path in (everyone.PAUSE, everyone.RESUME, *everyone.UPDATES)
        ]
        return applications.Starlette(
            routes=[
                route("/health", self._tell_health),
                route("/metrics", self._tell_figures),
                route("/replicas", self._list),
                route("/replicas", _answering(self._post), methods=["POST"]),
                route("/replicas", _answering(self._delete), methods=["DELETE"]),
                route(everyone.IS_PAUSED, self._ask_everyone),
                *to_all,
                routing.Mount("/", app=self._forward),
            ],
            exception_handlers={
                errors.ApiError: _explain,
                config.InputError: _explain,
            },
        )

    async def _tell_health(self, request: requests.Request) -> responses.Response:
        number = len(self.pool.answering())
        told = {"status": "ok" if number else "no replica", "replicas": number}
        return responses.JSONResponse(told, status_code=200 if number else 503)

    async def _tell_figures(self, request: requests.Request) -> responses.Response:
        own = metrics.render(self.pool, self._forward, self.door)
        urls = [*self.pool.ready()]
        asked = [self._link.ask("GET", f"{u}/metrics", _METRICS_SECONDS) for u in urls]
        found = await asyncio.gather(*asked, return_exceptions=True)
        texts = {
            url: answer.body.decode("utf-8", "replace")
            for url, answer in zip(urls, found, strict=True)
            if isinstance(answer, upstream.Answer) and answer.is_ok
        }
        return responses.PlainTextResponse(own + metrics.labelled(texts))

    async def _ask_everyone(self, request: requests.Request) -> responses.Response:
        path, query = request.url.path, request.url.query
        body, seconds = await request.body(), self._options.everyone_seconds
        target = f"{path}?{query}" if query else path
        one = request.query_params.get("replica")
        if one is not None and path in everyone.UPDATES:
            answers = await everyone.ask_one(
                self.pool, self._link, one, path, body, seconds
            )
        else:
            answers = await everyone.ask(
                self.pool, self._link, request.method, target, body, seconds
            )
        if path == everyone.IS_PAUSED:
            answer = everyone.pauses(answers)
        else:
            answer = everyone.merged(answers, path)
        return responses.Response(answer.body, answer.status, dict(answer.headers))

    async def _list(self, request: requests.Request) -> responses.Response:
        told = [replica.described() for replica in self.pool.replicas.values()]
        return responses.JSONResponse({"replicas": told})

    async def _post(self, fields: dict[str, Any]) -> dict[str, Any]:
        told = [fields.get(name, False) for name in ("has_weights", "prefill")]
        if not all(isinstance(value, bool) for value in told):
            raise errors.bad_request("has_weights and prefill must be true or false.")
        return self.join(_url(fields), *told).described()

    async def _delete(self, fields: dict[str, Any]) -> dict[str, Any]:
        replica = self.pool.replicas.get(pool_lib.checked(_url(fields)))
        if replica is None:
            raise errors.ApiError(404, "There is no such replica; see GET /replicas.")
        seconds = fields.get("drain_seconds", self._options.drain_seconds)
        if not isinstance(seconds, int | float) or not seconds >= 0:
            raise errors.bad_request("drain_seconds must be 0 or more.")
        cut = await self.leave(replica, seconds)
        return {"url": replica.url, "state": "left", "cut_off": cut}


Answered = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def _answering(act: Answered) -> Callable[[requests.Request], Awaitable[Any]]:
    """Returns a route that answers with what `act` makes of the body's fields."""

    async def answer(request: requests.Request) -> responses.Response:
        try:
            fields = await request.json()
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise errors.bad_request('Send JSON such as {"url": "http://HOST:PORT"}.')
        return responses.JSONResponse(await act(fields))

    return answer


def _url(fields: dict[str, Any]) -> str:
    url = fields.get("url")
    if not isinstance(url, str):
        raise errors.bad_request("url must be a text such as http://HOST:PORT.")
    return url


async def _explain(request: requests.Request, error: Exception) -> responses.Response:
    """Returns the answer to an error, in the form of the client's API."""
    if not isinstance(error, errors.ApiError):
        error = errors.bad_request(str(error))
    body = error.body(request.url.path)
    return responses.JSONResponse(body, error.status, dict(error.headers))
