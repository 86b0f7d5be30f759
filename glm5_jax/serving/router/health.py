"""Takes replicas out of service when they do not answer, and back when they do."""

import asyncio
import contextlib
import dataclasses
import re

from absl import logging

from glm5_jax.serving.router import pool as pool_lib
from glm5_jax.serving.router import upstream

State = pool_lib.State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checks:
    """How replicas are watched.

    Attributes:
      seconds: between two checks of a replica.
      max_seconds: for an answer.
      max_failures: checks without an answer, after which it is out of service.
      lost_seconds: out of service, after which its requests under way are broken.
    """

    seconds: float = 1.0
    max_seconds: float = 5.0
    max_failures: int = 3
    lost_seconds: float = 60.0


class Health:
    """Watches replicas, each in a task of its own.

    Attributes:
      model: name of the model that the first replica has; the others must have it too.
    """

    def __init__(
        self, pool: pool_lib.Pool, link: upstream.Upstream, checks: Checks
    ) -> None:
        """Watches nothing yet."""
        self._pool, self._link, self._checks = pool, link, checks
        self._tasks: dict[pool_lib.Replica, asyncio.Task[None]] = {}
        self.model: str | None = None

    def watch(self, replica: pool_lib.Replica) -> None:
        """Begins to watch a replica; no-op for one that is watched."""
        if replica not in self._tasks:
            self._tasks[replica] = asyncio.create_task(self._watch(replica))

    async def forget(self, replica: pool_lib.Replica) -> None:
        """Watches a replica no more."""
        if task := self._tasks.pop(replica, None):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def close(self) -> None:
        """Watches no replica any more."""
        for replica in [*self._tasks]:
            await self.forget(replica)

    async def _watch(self, replica: pool_lib.Replica) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        answered = loop.time()
        while True:
            try:
                await self.check(replica)
                failures, answered = 0, loop.time()
            except upstream.FAILURES as error:
                failures += 1
                shown = str(error) or "no answer in time"
                was_ready = replica.state == State.READY
                if not was_ready or failures >= self._checks.max_failures:
                    await self._pool.change(replica, State.DOWN, shown)
                if was_ready and replica.state == State.DOWN:
                    logging.warning("%s is out of service: %s", replica.url, shown)
                if loop.time() - answered > self._checks.lost_seconds:
                    replica.cut_off()
            await asyncio.sleep(self._checks.seconds)

    async def check(self, replica: pool_lib.Replica) -> None:
        """Asks a replica whether it is well, and takes it into service if it is fit.

        Raises:
          one of FAILURES: it does not answer.
        """
        found = await self._ask(replica, "GET", "/health")
        if not found.is_ok:
            raise OSError(f"/health answers {found.status}")
        if replica.state in (State.READY, State.LEAVING):
            return
        async with self._pool.in_service:
            reason = await self._unfit(replica)
            state = State.UNFIT if reason else State.READY
            if state == State.READY or replica.reason != reason:
                logging.info("%s is %s. %s", replica.url, state, reason)
            await self._pool.change(replica, state, reason)

    async def _unfit(self, replica: pool_lib.Replica) -> str:
        """Returns why a replica that answers must not get requests, or nothing."""
        models = await self._ask(replica, "GET", "/v1/models")
        if not models.is_ok:
            return f"/v1/models answers {models.status}: {models.json}"
        try:
            name = models.json["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            return "/v1/models does not list models; is this a server of a model?"
        if self.model not in (None, name):
            return f"It serves {name!r}, and the others {self.model!r}."
        if reason := await self._wrong_weights(replica):
            return reason
        for path, is_due in (
            ("/pause", self._pool.is_paused),
            ("/resume", replica.missed_resume and not self._pool.is_paused),
        ):
            if is_due:
                found = await self._ask(replica, "POST", path)
                if not found.is_ok:
                    return f"{path} answers {found.status}: {found.json}"
        replica.missed_resume = False
        self.model = name
        return ""

    async def _wrong_weights(self, replica: pool_lib.Replica) -> str:
        """Returns in what its weights differ from those in service, or nothing."""
        pool, version = self._pool, await self._version(replica)
        for other in pool.ready().values():
            with contextlib.suppress(*upstream.FAILURES):
                pool.version = await self._version(other)
                break
        if pool.version is None or replica.is_trusted:
            pool.version = version
        if version in (None, pool.version):
            return ""
        return (
            f"It has version {version:.0f} of the weights, and the others "
            f"{pool.version:.0f}; update the weights again, or, if they are right, "
            f'POST it to /replicas with "has_weights": true.'
        )

    async def _version(self, replica: pool_lib.Replica) -> float | None:
        """Returns the version of its weights, if it tells."""
        figures = await self._ask(replica, "GET", "/metrics")
        text = figures.body.decode("utf-8", "replace") if figures.is_ok else ""
        found = re.search(r"^glm5_jax_weights_version (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else None

    async def _ask(
        self, replica: pool_lib.Replica, method: str, path: str
    ) -> upstream.Answer:
        url = replica.url + path
        return await self._link.ask(method, url, self._checks.max_seconds)
