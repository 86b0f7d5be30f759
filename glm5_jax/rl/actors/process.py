"""The orchestrator as a process of its own, which a trainer asks over HTTP.

    POST /start   {"groups": {...}, "journal": "..."}  begins to play: see `Groups`
    POST /publish {"folder": "...", "version": 3}  gives the servers new weights
    POST /take    {"version": 3, "seconds": 60}    waits for the groups of a step
    POST /evaluate {"seconds": 60}                 plays the held-out tasks
    POST /evaluate_beside {"version": 3}           the same; a later /take has them
    POST /memory  {"version": 3}                   what a checkpoint must keep
    GET  /status                                   what a person wants to see

What is not ready within its seconds is answered by {"is_ready": false}, and asked for
again. A failure of a run is 500 with its message. Nothing here imports jax.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
from absl import logging
from aiohttp import web

from glm5_jax import api_key, environments
from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import threads
from glm5_jax.rl import (
    at_once,
    completer,
    entrance,
    held_out,
    jobs,
    long_json,
    trajectories,
)
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import beside, monitor, pinned, remote
from glm5_jax.rl.actors import fleet as fleet_lib
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import journal as journal_lib
from glm5_jax.rl.actors import lag as lag_lib
from glm5_jax.rl.actors import orchestrator as orchestrator_lib

_REPAIR_SECONDS = 1.0
_RETRY_SECONDS = 0.5  # from an engine's error to the next attempt, times their number
_IDLE_SECONDS = 2.0  # of a connection to the servers, which keep it for 30 s
_MAX_BODY = 2**26
_NOT_READY = {"is_ready": False}


class Process:
    """An orchestrator behind HTTP."""

    def __init__(self, config: config_lib.TrainConfig, servers: str) -> None:
        """Opens the environment.

        Args:
          config: of the run.
          servers: URL of the router before the servers.

        Raises:
          InputError: the environment or the tokenizer is unusable.
        """
        self._config, self._servers = config, servers
        self._taskset = environments.make(config.rl.environment)
        tokenizer = tokenizer_lib.for_corpus(config.data, [])
        self._template = templates.make_template(config.data, tokenizer)
        self._held_out = held_out.jobs(self._taskset, config.rl)
        self._stall_seconds = jobs.stall_seconds(config.rl, self._taskset)
        self._fleet: fleet_lib.Fleet
        self._engine: remote.Remote
        self._pinned: pinned.Pinned | None = None  # servers that only evaluate
        self._ask_capacity: Callable[[], Awaitable[int]]
        self._is_published = False
        self._context: episodes_lib.Context
        self._orchestrator: orchestrator_lib.Orchestrator | None = None
        self._tasks: set[asyncio.Task] = set()
        self._failure: BaseException | None = None  # of one of them
        self._asked_for: dict[str, asyncio.Task] = {}  # what takes long, by its path
        self._lag = lag_lib.Lag()

    def app(self) -> web.Application:
        """Returns the routes."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.cleanup_ctx.append(self._running)
        for path, handler in (
            ("/start", self._start),
            ("/publish", self._publish),
            ("/take", self._take),
            ("/evaluate", self._evaluate),
            ("/evaluate_beside", self._evaluate_beside),
            ("/memory", self._memory),
        ):
            app.router.add_post(path, _answering(handler))
        app.router.add_get("/status", _answering(self._status))
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        """Keeps what runs beside the requests."""
        asyncio.get_running_loop().set_default_executor(threads.Threads())
        # Each episode has a connection, which ends before a server would close it.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
        headers = api_key.header(api_key.given())
        async with aiohttp.ClientSession(
            connector=connector, headers=headers
        ) as session:
            rl = self._config.rl
            self._fleet = fleet_lib.Fleet(
                session, self._servers, clears_cache=rl.clears_cache
            )
            self._ask_capacity = functools.partial(
                remote.capacity_of, session, self._servers
            )
            self._engine = remote.Remote(
                session,
                self._servers,
                self._config.data.sequence_length,
                seconds=rl.answer_timeout_seconds,
                with_experts=self._config.replays_routing,
            )
            if rl.eval_servers:
                self._pinned = pinned.Pinned(
                    session,
                    rl.eval_servers,
                    self._config.data.sequence_length,
                    rl.answer_timeout_seconds,
                )
            context = episodes_lib.Context(
                self._engine, self._taskset, self._template, jobs.settings(rl)
            )
            async with entrance.of(context) as self._context:
                self._spawn(self._fleet.repair(_REPAIR_SECONDS))
                if self._pinned is not None:
                    self._spawn(self._pinned.fleet.repair(_REPAIR_SECONDS))
                self._spawn(self._lag.measure())
                try:
                    with self._lag.naming():
                        yield
                finally:
                    tasks = [*self._tasks, *self._asked_for.values()]
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, coroutine: Any) -> None:
        """Runs what ends with the process alone; if it fails, so does the run."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task) -> None:
        """Lets `/take` raise what a task failed with, also one that waits."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            logging.error("What runs beside the requests failed.", exc_info=error)
            if self._orchestrator is not None:
                self._orchestrator.give_up(error)

    async def _start(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._orchestrator is not None:
            raise RuntimeError("the orchestrator has started already.")
        rl, folder = self._config.rl, body["journal"]
        groups = groups_lib.Groups[orchestrator_lib.Group](
            rl.prompts_per_step,
            rl.max_staleness,
            body["groups"],
            max_dropped=jobs.most_dropped(rl),
        )
        evaluation = None
        if self._pinned is not None:
            apart = dataclasses.replace(self._context, engine=self._pinned.engine)
            evaluation = beside.Beside(apart)
        self._orchestrator = orchestrator_lib.Orchestrator(
            self._context,
            lambda index: jobs.of_group(self._config, self._taskset, index, index),
            groups,
            drop_equal=rl.dynamic_sampling,
            evaluation=evaluation,
            journal=journal_lib.Journal(folder and pathlib.Path(folder)),
            watch=monitor.Settings(
                quarantine=rl.quarantine, canary_every=rl.canary_every
            ),
        )
        self._spawn(self._orchestrator.run())
        return {}

    async def _publish(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._fleet.publish(body["folder"], body["version"])
        self._engine.versions_ahead = self._fleet.ahead
        if not self._is_published:  # servers without its weights may not have answered
            self._engine.capacity = min(
                await self._ask_capacity(), self._config.data.sequence_length
            )
            self._is_published = True
        return {}

    async def _take(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._orchestrator is not None, "/start comes first"
        if self._failure is not None:
            raise self._failure
        made, stall_seconds = self._orchestrator, self._stall_seconds

        def take() -> Coroutine[Any, Any, Any]:
            made.published(body["version"])  # once: it counts as an advance
            return made.take(stall_seconds)

        if not await self._is_ready("/take", body, take):
            return _NOT_READY
        taken = self._asked_for.pop("/take").result()
        played = self._orchestrator.played()
        groups = [group for _, group in taken]
        # In a thread: a thousand episodes take longer than the loop may be late.
        wanted = [*groups, played.episodes, played.unused]
        packed = await asyncio.to_thread(trajectories.pack, wanted)
        evaluated = made.evaluation.taken()
        ended = evaluated.episodes if evaluated else ()
        records = await asyncio.to_thread(trajectories.all_to_json, ended)
        return {
            "played": packed,
            "evaluated": evaluated and [evaluated.version, records],
            "counts": played.counts,
            "memory": made.groups.state(body["version"] + 1),
            "ledger": self._orchestrator.groups.ledger(),
            "figures": self._orchestrator.figures(),
            "lag": self._lag.taken(),
            "repaired": self._fleet.num_repaired,
        }

    async def _evaluate(self, body: dict[str, Any]) -> dict[str, Any]:
        play = functools.partial(at_once.run_all, run=_played)
        if not await self._is_ready(
            "/evaluate", body, lambda: play(self._context, self._held_out)
        ):
            return _NOT_READY
        played = self._asked_for.pop("/evaluate").result()
        return {"episodes": await asyncio.to_thread(trajectories.all_to_json, played)}

    async def _evaluate_beside(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self._orchestrator is not None, "/start comes first"
        prepare = None
        if self._pinned is not None and self._fleet.current is not None:
            prepare = functools.partial(self._pinned.take, *self._fleet.current)
        evaluation = self._orchestrator.evaluation
        evaluation.begin(self._held_out, body["version"], prepare)
        return {}

    async def _is_ready(
        self,
        path: str,
        body: dict[str, Any],
        make: Callable[[], Coroutine[Any, Any, Any]],
    ) -> bool:
        """Returns whether what a path asks for is made within its seconds.

        Args:
          path: whose task, in `_asked_for`, goes on until it is asked for again.
          body: with the seconds; without them it waits.
          make: makes it.
        """
        if path not in self._asked_for:
            self._asked_for[path] = asyncio.create_task(make())
        task = self._asked_for[path]
        await asyncio.wait({task}, timeout=body.get("seconds"))
        return task.done()

    async def _memory(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._orchestrator is None:
            return {}
        saved = self._orchestrator.groups.state(body["version"])
        self._orchestrator.groups.commit(body["version"])
        return saved

    async def _status(self, body: dict[str, Any]) -> dict[str, Any]:
        started = self._orchestrator
        return {
            "version": None if started is None else started.groups.version,
            "ledger": {} if started is None else started.groups.ledger(),
            "episodes": {} if started is None else started.places.of_tags,
            "waiting": 0 if started is None else len(started.places.waiting),
            "replicas": await self._fleet.replicas(),
            "max_lag_seconds": round(self._lag.longest, 3),
            "repaired": self._fleet.num_repaired,
        }


async def _played(
    context: episodes_lib.Context, job: episodes_lib.Job
) -> episodes_lib.Episode:
    """Plays an episode, which begins again after an error of the engines.

    Raises:
      EngineError: they failed MAX_FAILURES times in a row.
    """
    num_failures = 0
    while True:
        try:
            return await episodes_lib.run(context, job)
        except completer.EngineError as error:
            num_failures += 1
            if num_failures == orchestrator_lib.MAX_FAILURES:
                raise
            logging.warning("An episode of the evaluation begins again: %s", error)
        await asyncio.sleep(_RETRY_SECONDS * num_failures)


def _answering(
    handler: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Returns a handler of aiohttp: JSON in, JSON out."""

    async def handle(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = {}
        with contextlib.suppress(json.JSONDecodeError):
            body = await request.json()
        try:
            answer = await handler(body)
        except Exception as error:
            logging.exception("%s failed.", request.path)
            told = {"error": str(error), "type": type(error).__name__}
            return web.json_response(told, status=500)
        text = await asyncio.to_thread(long_json.dumps, answer)
        return web.Response(text=text, content_type="application/json")

    return handle
