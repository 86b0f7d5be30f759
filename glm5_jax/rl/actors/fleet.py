"""Gives the servers of a run their weights, also those that start again.

The servers are behind a router (glm5_jax/serving/router), which asks none that has
other weights than the rest. A version is a folder of a weight store below the root
that the servers were started with. Nothing here imports jax.
"""

import asyncio
import time
from typing import Any

import aiohttp
from absl import logging

from glm5_jax.rl import completer

START, UPDATE = "/start_weight_update", "/update_weights"
FINISH, REPLICAS = "/finish_weight_update", "/replicas"
_READY = "ready"
_SECONDS = 600.0  # for a server to start, and to read its weights
_POLL_SECONDS = 0.2
_CHECKED_SECONDS = 3.0  # within which the router sees that a server is right
_SHOWN = 300  # characters of an answer


class Fleet:
    """The servers behind a router."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """Asks nothing yet.

        Args:
          session: with the key of the servers among its headers, if they have one.
          url: of the router.
        """
        self._session, self._url = session, url.rstrip("/")
        self._current: tuple[str, int] | None = None  # folder and version
        self._publishing = asyncio.Lock()
        self._wait_until: dict[str, float] = {}  # by server that got weights apart
        self.num_repaired = 0  # servers that got their weights apart

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
          EngineError: no server took it in time.
        """
        deadline = time.monotonic() + seconds
        async with self._publishing:
            # At once: a server that starts now must not get the version before.
            self._current = folder, version
            await self._push(self._url)
            while not any(r["state"] == _READY for r in await self.replicas()):
                if time.monotonic() > deadline:
                    raise completer.EngineError(
                        f"no server behind {self._url} has taken version {version} "
                        f"in {seconds:g} s."
                    )
                await asyncio.sleep(_POLL_SECONDS)
                await self._repair()

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
          EngineError: the router does not answer.
        """
        status, found = await self._ask("GET", self._url + REPLICAS)
        if status != 200:
            raise completer.EngineError(f"{REPLICAS} answers {status}: {found}")
        return found["replicas"]

    async def _repair(self) -> None:
        if self._current is None:
            return
        now = time.monotonic()
        for replica in await self.replicas():
            url = replica["url"]
            if replica["state"] != "unfit" or now < self._wait_until.get(url, now):
                continue
            self._wait_until[url] = now + _CHECKED_SECONDS
            if await self._push(url):
                # If no other is in service, the router cannot know that it is right.
                trusted = {"url": url, "has_weights": True}
                await self._ask("POST", self._url + REPLICAS, trusted)
                self.num_repaired += 1
                logging.info("%s got version %d apart.", url, self._current[1])

    async def _push(self, url: str) -> bool:
        """Sends the current version to a server, or through the router to all."""
        assert self._current is not None
        folder, version = self._current
        for path, body in (
            (START, {}),
            (UPDATE, {"update_info": {"path": folder}}),
            (FINISH, {"weight_version": version}),
        ):
            status, answer = await self._ask("POST", url + path, body)
            if status != 200:
                logging.warning("%s%s answers %d: %s", url, path, status, answer)
                if status == 0 or url != self._url:
                    return False
        return True

    async def _ask(self, method: str, url: str, body: Any = None) -> tuple[int, Any]:
        """Returns status and answer; 0 if there is none."""
        limit = aiohttp.ClientTimeout(total=_SECONDS)
        try:
            async with self._session.request(
                method, url, json=body, timeout=limit
            ) as response:
                if response.status == 200:
                    return 200, await response.json()
                return response.status, (await response.text())[:_SHOWN]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return 0, str(error) or type(error).__name__
