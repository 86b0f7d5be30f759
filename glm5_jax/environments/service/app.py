"""The routes of a service of environments."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from absl import logging
from starlette import applications, requests, responses, routing
from starlette import exceptions as starlette_exceptions

from glm5_jax import config, messages
from glm5_jax.environments import protocol
from glm5_jax.environments.service import live, wire
from glm5_jax.http_server import errors, guard

_MOST_NUMBER = 2**63  # of seeds and indices
_STATUS = {
    wire.UNKNOWN_TASK: 409,
    wire.UNKNOWN_EPISODE: 404,
    wire.BUSY: 409,
    wire.OVER: 409,
    wire.FULL: 429,
    wire.DRAINING: 503,
}
_Route = Callable[[requests.Request], Awaitable[responses.Response]]


class App:
    """A service; its attribute `door` is the ASGI application.

    Attributes:
        door: all routes, behind key and limits.
    """

    def __init__(
        self,
        taskset: protocol.Taskset,
        episodes: live.Episodes,
        limits: guard.Limits,
    ) -> None:
        """Joins the routes.

        Args:
            taskset: that is served.
            episodes: of it.
            limits: of requests.
        """
        self._taskset, self._episodes = taskset, episodes
        self.door = guard.Guard(self._routes(), limits)

    def _routes(self) -> applications.Starlette:
        one = f"{wire.EPISODES}/{{key}}"

        def route(path: str, answer: _Route, method: str) -> routing.Route:
            return routing.Route(path, _guarded(answer), methods=[method])

        return applications.Starlette(
            routes=[
                route("/health", self._health, "GET"),
                route("/metrics", self._metrics, "GET"),
                route(wire.TASKSET, self._describe, "GET"),
                route(wire.TASKS, self._list, "GET"),
                route(wire.EPISODES, self._begin, "POST"),
                route(one, self._observe, "GET"),
                route(f"{one}/step", self._step, "POST"),
                route(one, self._end, "DELETE"),
            ],
            exception_handlers={starlette_exceptions.HTTPException: _explain},
        )

    async def _health(self, request: requests.Request) -> responses.Response:
        is_ending = self._episodes.is_draining
        told = {"status": "draining" if is_ending else "ok"}
        return responses.JSONResponse(told, 503 if is_ending else 200)

    async def _metrics(self, request: requests.Request) -> responses.Response:
        return responses.PlainTextResponse(_figures(self._episodes, self.door))

    async def _describe(self, request: requests.Request) -> responses.Response:
        splits = [*protocol.splits(self._taskset)]
        size = getattr(self._taskset, "size", None)
        return responses.JSONResponse(
            {
                "protocol": wire.VERSION,
                "name": self._taskset.name,
                "splits": splits,
                "sizes": {split: size(split) for split in splits} if size else None,
            }
        )

    async def _list(self, request: requests.Request) -> responses.Response:
        query = request.query_params
        split = self._split(query.get("split"))
        seed, first, count = (
            _number(query.get(name, default), name)
            for name, default in (("seed", "0"), ("first", "0"), ("count", "1"))
        )
        if count > wire.MOST_TASKS:
            raise errors.bad_request(f"count may be at most {wire.MOST_TASKS}.")
        told = []
        for index in range(first, first + count):
            task = self._episodes.task(split, seed, index)
            told.append(self._episodes.told_task(task))
            await asyncio.sleep(0)  # others' steps come between
        return responses.JSONResponse({"tasks": told})

    async def _begin(self, request: requests.Request) -> responses.Response:
        fields = await _fields(request)
        task_id = fields.get("id", "")
        if not isinstance(task_id, str):
            raise errors.bad_request("id must be the text of a listed task.")
        episode = await self._episodes.begin(
            self._split(fields.get("split")),
            _number(fields.get("seed", 0), "seed"),
            _number(fields.get("index"), "index"),
            task_id,
        )
        told = {"episode": episode.key, "task": self._episodes.told_task(episode.task)}
        return responses.JSONResponse({**told, "messages": episode.history}, 201)

    async def _observe(self, request: requests.Request) -> responses.Response:
        episode = self._episodes.found(request.path_params["key"])
        last = episode.last
        reward = None
        if last is not None and last.reward is not None:
            reward = wire.told_reward(last.reward)
        said = json.dumps(episode.history)  # JSON has no numbers that are not finite
        return responses.JSONResponse(
            {
                "episode": episode.key,
                "task": self._episodes.told_task(episode.task),
                "messages": json.loads(said, parse_constant=str),
                "turns": episode.num_turns,
                "is_over": last is not None,
                "reward": reward,
            }
        )

    async def _step(self, request: requests.Request) -> responses.Response:
        message = (await _fields(request)).get("message")
        told = await self._episodes.step(request.path_params["key"], _turn(message))
        return responses.JSONResponse(told)

    async def _end(self, request: requests.Request) -> responses.Response:
        self._episodes.end(request.path_params["key"])
        return responses.Response(status_code=204)

    def _split(self, split: Any) -> str:
        known = protocol.splits(self._taskset)
        if split not in known:
            raise errors.bad_request(
                f"split must be one of {', '.join(known)}, got {split!r:.60}.",
                wire.UNKNOWN_TASK,
            )
        return split


async def _fields(request: requests.Request) -> dict[str, Any]:
    """Returns the fields of a body.

    Raises:
        ApiError: it is no JSON object, or no text can hold it.
    """
    try:
        fields = await request.json()
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half characters, endless nesting
        fields = None
    if not isinstance(fields, dict):
        raise errors.bad_request("The body must be a JSON object of texts.")
    return fields


def _number(given: Any, name: str) -> int:
    """Returns a number from 0 on.

    Raises:
        ApiError: it is none.
    """
    if isinstance(given, str) and given.isdecimal() and len(given) < 20:
        given = int(given)
    if type(given) is not int or not 0 <= given < _MOST_NUMBER:
        raise errors.bad_request(f"{name} must be a whole number from 0 on.")
    return given


def _turn(message: Any) -> messages.Message:
    """Returns an assistant's turn.

    Raises:
        ApiError: it is none.
    """
    try:
        if not isinstance(message, dict) or messages.role_of(message) != "assistant":
            raise config.InputError("its role must be assistant.")
        for key in ("content", "reasoning_content"):
            messages.text_of(message, key)
        messages.calls_in(message)
    except config.InputError as error:
        raise errors.bad_request(f"message must be an assistant's: {error}") from error
    return message


def _guarded(answer: _Route) -> _Route:
    """Returns a route that answers errors, too.

    What an environment raises may hold what it scores with: a client learns the kind
    of it alone, and the log has the rest.
    """

    async def guarded(request: requests.Request) -> responses.Response:
        try:
            return await answer(request)
        except errors.ApiError as error:
            found = error
        except live.RefusedError as error:
            found = errors.ApiError(_STATUS[error.code], str(error), error.code)
            if error.code in (wire.FULL, wire.DRAINING):
                found.headers = {"Retry-After": "1"}
        except protocol.RewardError:
            logging.exception("%s: no reward", request.url.path)
            found = errors.ApiError(500, "The reward failed.", wire.UNSCORED)
        except TimeoutError:
            logging.warning("%s: the environment took too long", request.url.path)
            found = errors.ApiError(504, "The environment took too long.", wire.LATE)
        except Exception as error:
            logging.exception("%s", request.url.path)
            told = f"The environment raised {type(error).__name__}; see the log."
            found = errors.ApiError(500, told, wire.FAILED)
        return _told(found, request)

    return guarded


async def _explain(request: requests.Request, error: Exception) -> responses.Response:
    """Returns the answer to a request for which there is no route."""
    assert isinstance(error, starlette_exceptions.HTTPException)
    shown = f"{request.method} {request.url.path}: {error.detail}."
    headers = dict(error.headers or {})
    return _told(errors.ApiError(error.status_code, shown, None, headers), request)


def _told(error: errors.ApiError, request: requests.Request) -> responses.Response:
    body = error.body(request.url.path)
    return responses.JSONResponse(body, error.status, dict(error.headers))


def _figures(episodes: live.Episodes, door: guard.Guard) -> str:
    """Returns the figures in the text form of Prometheus."""
    lines = []
    for name, kind, text, value in (
        ("live", "gauge", "Episodes that have not ended.", len(episodes)),
        ("begun_total", "counter", "Episodes that began.", episodes.num_begun),
        ("refused_total", "counter", "That had no room.", episodes.num_refused),
        ("steps_total", "counter", "Steps of episodes.", episodes.num_steps),
        ("requests_refused_total", "counter", "Beyond limits.", door.num_refused),
    ):
        full = f"glm5_jax_episodes_{name}"
        lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {value}"]
    full = "glm5_jax_episodes_ended_total"
    lines += [f"# HELP {full} Episodes that ended, by how.", f"# TYPE {full} counter"]
    lines += [
        f'{full}{{ending="{ending}"}} {episodes.endings[ending]}'
        for ending in live.ENDINGS
    ]
    return "\n".join([*lines, ""])
