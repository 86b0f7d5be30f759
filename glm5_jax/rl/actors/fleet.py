"""Gives the servers of a run their weights, also those that start again.

The servers are behind a router (glm5_jax/serving/router), which asks none that has
other weights than the rest. A version is a folder of a weight store below the root
that the servers were started with. Nothing here imports jax.

A run counts versions from 0, or from its checkpoint. Servers that another run has used
have a later version, and theirs must increase: they count from there on.
"""

import asyncio
import re
import time
from typing import Any

import aiohttp
from absl import logging

from glm5_jax.rl import completer

START, UPDATE = "/start_weight_update", "/update_weights"
FINISH, REPLICAS, METRICS = "/finish_weight_update", "/replicas", "/metrics"
_READY = "ready"
_SECONDS = 600.0  # for a server to start, and to read its weights
_POLL_SECONDS = 0.2
_AGAIN_SECONDS = 2.0  # until servers that did not take a version are sent it again
_CHECKED_SECONDS = 3.0  # within which the router sees that a server is right
_SHOWN = 300  # characters of an answer
_REFUSED = frozenset((400, 401, 403, 404, 413, 422))  # comes never
_VERSION = re.compile(r"^glm5_jax_weights_version(?:\{.*\})? (\S+)$", re.MULTILINE)


class Fleet:
    """The servers behind a router."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, clears_cache: bool = False
    ) -> None:
        """Asks nothing yet.

        Args:
          session: with the key of the servers among its headers, if they have one.
          url: of the router.
          clears_cache: whether servers read with a version what an older one has read.
        """
        self._more = {"clear_cache": True} if clears_cache else {}
        self._session, self._url = session, url.rstrip("/")
        self.current: tuple[str, int] | None = None  # folder and version
        self._publishing = asyncio.Lock()
        self._wait_until: dict[str, float] = {}  # by server that got weights apart
        self.num_repaired = 0  # servers that got their weights apart
        self.ahead = 0  # the servers' number of a version, minus the run's

    async def publish(
        self, folder: str, version: int, seconds: float = _SECONDS
    ) -> None:
        """Gives all servers a version; they draw with it from their next step on.

        A server that fails is out of service until `repair` has given it the version.
        If all of them do, it waits for one that starts again.

        Args:
          folder: of the version, relative to the root of the servers.
          version: above the last one.
          seconds: to wait.

        Raises:
          EngineError: no server took it in time, or they refuse it.
        """
        deadline = time.monotonic() + seconds
        async with self._publishing:
            if self.current is None:
                last = await self._first_version(deadline)
                self.ahead = last + 1 - version if 0 < last >= version else 0
            # At once: a server that starts now must not get the version before.
            self.current = folder, version
            status, answer = await self._push()
            if status in _REFUSED:
                raise completer.EngineError(
                    f"the servers behind {self._url} refuse version {version} "
                    f"({status}): {answer}"
                )
            while True:
                is_in_service = await self._is_in_service()
                last = await self._last_version() if is_in_service else None
                if last is not None and last >= version + self.ahead:
                    return
                if time.monotonic() > deadline:
                    raise completer.EngineError(
                        f"no server behind {self._url} has taken version {version} "
                        f"in {seconds:g} s: those in service tell {last} at {METRICS}."
                    )
                if last is not None:  # none of them took it
                    await asyncio.sleep(_AGAIN_SECONDS)
                    await self._push()
                else:
                    await asyncio.sleep(_POLL_SECONDS)
                    await self._repair()

    async def _is_in_service(self) -> bool:
        """Returns whether a server is in service, with whatever version."""
        return any(r["state"] == _READY for r in await self.replicas())

    async def _first_version(self, deadline: float) -> int:
        """Returns the version of the servers in service; 0 if none is.

        Raises:
          EngineError: they have not told it at the deadline.
        """
        while (last := await self._last_version()) is None:
            if not await self._is_in_service():
                return 0
            if time.monotonic() > deadline:
                raise completer.EngineError(
                    f"the servers behind {self._url} do not tell the version of their "
                    f"weights at {METRICS}, as those of python -m glm5_jax.serve do."
                )
            await asyncio.sleep(_POLL_SECONDS)
        return last

    async def repair(self, seconds: float) -> None:
        """Gives servers that missed a version the current one, until cancelled.

        Args:
          seconds: between two looks.
        """
        while True:
            await asyncio.sleep(seconds)
            try:
                async with self._publishing:
                    await self._repair()
            except completer.EngineError as error:
                logging.warning("Servers cannot be looked at: %s", error)

    async def replicas(self) -> list[dict[str, Any]]:
        """Returns the servers: url, state, reason, load.

        Raises:
          EngineError: the router does not answer, or in another form.
        """
        status, found = await self._ask("GET", self._url + REPLICAS)
        try:
            if status == 200:
                return [
                    {**r, "url": r["url"], "state": r["state"]}
                    for r in found["replicas"]
                ]
        except (KeyError, TypeError):
            found = f"another form: {found!r}"[:_SHOWN]
        raise completer.EngineError(f"{REPLICAS} answers {status}: {found}")

    async def _repair(self) -> None:
        if self.current is None:
            return
        now = time.monotonic()
        for replica in await self.replicas():
            url = replica["url"]
            if replica["state"] != "unfit" or now < self._wait_until.get(url, now):
                continue
            self._wait_until[url] = now + _CHECKED_SECONDS
            if (await self._push(url))[0] == 200:
                # If no other is in service, the router cannot know that it is right.
                trusted = {"url": url, "has_weights": True}
                await self._ask("POST", self._url + REPLICAS, trusted)
                self.num_repaired += 1
                logging.info("%s got version %d apart.", url, self.current[1])

    async def _push(self, replica: str | None = None) -> tuple[int, Any]:
        """Sends the current version through the router, to all servers or to one.

        The router alone may reach a server, and know its key.

        Args:
          replica: the address that the router tells of the one server.

        Returns:
          The first status that is not 200, with its answer; else 200.
        """
        assert self.current is not None
        folder, version = self.current
        failed: tuple[int, Any] | None = None
        info = {"update_info": {"path": folder}}
        for path, body in (
            (START, {}),
            (UPDATE, info),
            # By name: a server may have missed the two, and hold an older version.
            (FINISH, {"weight_version": version + self.ahead, **info, **self._more}),
        ):
            status, answer = await self._ask("POST", self._url + path, body, replica)
            if status != 200:
                where = replica or self._url
                logging.warning("%s%s answers %d: %s", where, path, status, answer)
                failed = failed or (status, answer)
                if status == 0 or replica is not None:
                    break
        return failed or (200, None)

    async def _last_version(self) -> int | None:
        """Returns the latest version that servers in service tell of; None: none does.

        Of a busy one, a router tells nothing.
        """
        status, text = await self._ask("GET", self._url + METRICS, is_json=False)
        found = _VERSION.findall(text) if status == 200 else ()
        return max((int(float(number)) for number in found), default=None)

    async def _ask(
        self,
        method: str,
        url: str,
        body: Any = None,
        replica: str | None = None,
        *,
        is_json: bool = True,
    ) -> tuple[int, Any]:
        """Returns status and answer; 0 if there is none."""
        limit = aiohttp.ClientTimeout(total=_SECONDS)
        only = {} if replica is None else {"replica": replica}
        try:
            async with self._session.request(
                method, url, json=body, params=only, timeout=limit
            ) as response:
                if response.status == 200:
                    answer = response.json() if is_json else response.text()
                    return 200, await answer
                return response.status, (await response.text())[:_SHOWN]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return 0, str(error) or type(error).__name__
