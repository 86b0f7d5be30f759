"""The tasks of a service, by its address: "http://HOST:PORT".

A service that ends spoils the episodes that it was playing. New ones wait for it to
answer again, for minutes: then the run ends, and can be resumed. What a user can mend,
a wrong key or another address, is an error at once.
"""

import asyncio
import collections
import http.client
import json
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from glm5_jax import api_key, config, messages
from glm5_jax.environments import protocol
from glm5_jax.environments.service import wire
from glm5_jax.http_server import extra

SCHEMES = ("http", "https")
KEY_VARIABLE = "GLM5_JAX_ENVIRONMENT_KEY"  # one that models' servers do not know
_CONNECT_SECONDS = 5.0
_LIST_SECONDS = 30.0
_CALL_SECONDS = 900.0  # the caller's limit is shorter, and so is the service's
_AGAIN_SECONDS = 0.5  # before a second try
_PATIENCE_SECONDS = 180.0  # with a service that tells no tasks
_MOST_BETWEEN = 10.0  # seconds between two requests for them
_FULL_SECONDS = 45.0  # for which an episode waits to begin; its caller waits longer
_MOST_BYTES = 2**26  # of an answer
_LATER = 408, 429  # statuses of a request that may come again
_PAGE = 32  # tasks that are fetched together
_PAGES = 64  # of them that are kept
_UNCONNECTED = "unconnected"  # a code of no answer: nothing of a request was sent
_UNTOLD = 2**31  # tasks of a split whose number the service does not tell


class ServiceError(Exception):
    """Raised when a service does not do what it should; it spoils an episode."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        """Takes a text for people, and status and code of an answer, if there is one.

        Args:
            message: what happened.
            status: of the answer; 0: there is none.
            code: of wire.py, or _UNCONNECTED.
        """
        super().__init__(message)
        self.status, self.code = status, code


class Remote:
    """The tasks of a service, whose episodes it plays."""

    has_agents = False

    def __init__(self, name: str) -> None:
        """Asks the service what it has.

        Args:
            name: its address.

        Raises:
            config.InputError: it is no address, nobody answers there, the key is wrong
                or no header holds it, or the extra serve is missing.
        """
        self.name = name
        extra.require(f"rl.environment={name!r}")
        self._url = _checked(name)
        self._pages: collections.OrderedDict[tuple[str, int, int], Any] = (
            collections.OrderedDict()
        )
        try:
            told = self._ask(wire.TASKSET)
            if told["protocol"] != wire.VERSION:
                raise ServiceError(f"it speaks protocol {told['protocol']!r}")
            self.splits: Sequence[str] = [
                split for split in protocol.SPLITS if split in told["splits"]
            ]
            self._sizes: Mapping[str, int] = told["sizes"] or {}
        except (ServiceError, LookupError, TypeError) as error:
            if getattr(error, "status", 0) == 401:
                raise config.InputError(
                    f"{name!r} wants a key; put it into ${KEY_VARIABLE}."
                ) from error
            raise config.InputError(
                f"{name!r} is no service of environments that answers ({error}); start "
                f"one by `python -m glm5_jax.environments serve NAME --port=PORT`, or "
                f"name another."
            ) from error

    def size(self, split: str) -> int:
        """Returns the number of tasks of a split; very many if they have no end."""
        return self._sizes.get(split, _UNTOLD)

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task; waits while the service is away, so call it in a thread.

        Raises:
            config.InputError: the service has no such task, wants another key, or has
                been away for too long.
        """
        place = {"split": split, "seed": seed, "index": index}
        page = self._page(split, seed, index // _PAGE)
        try:
            return wire.read_task(page["tasks"][index % _PAGE], place)
        except (ValueError, LookupError, TypeError) as error:
            raise config.InputError(
                f"{self.name} does not tell task {index} of {split!r}: {error!r}"
            ) from error

    def environment(self) -> "Episode":
        """Returns an environment for one episode."""
        return Episode(self._url)

    def demonstration(self, task: protocol.Task) -> Sequence[messages.Message] | None:
        """Returns None: solutions stay where they are."""
        del task
        return None

    def _page(self, split: str, seed: int, number: int) -> Any:
        """Returns what the service tells of tasks that are fetched together.

        Raises:
            config.InputError: the service refuses, or has been away for too long.
        """
        key = split, seed, number
        if key not in self._pages:
            fields = {"split": split, "seed": seed, "first": number * _PAGE}
            query = urllib.parse.urlencode({**fields, "count": _PAGE})
            self._pages[key] = self._ask_patiently(f"{wire.TASKS}?{query}")
            while len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
        self._pages.move_to_end(key)
        return self._pages[key]

    def _ask_patiently(self, path: str) -> Any:
        """Returns what the service answers to a GET, once it does.

        Raises:
            config.InputError: it refuses, or has been away for too long.
        """
        deadline, wait = time.monotonic() + _PATIENCE_SECONDS, _AGAIN_SECONDS
        while True:
            try:
                return self._ask(path)
            except ServiceError as error:
                if 400 <= error.status < 500 and error.status not in _LATER:
                    raise config.InputError(f"{self.name}: {error}") from error
                if time.monotonic() > deadline:
                    raise config.InputError(
                        f"{self.name} has told no tasks for {_PATIENCE_SECONDS:g} s "
                        f"({error}). Start it again; a run then resumes by the same "
                        f"command."
                    ) from error
                logging.warning("%s; asks again in %.1f s.", error, wait)
            time.sleep(wait)
            wait = min(2 * wait, _MOST_BETWEEN)

    def _ask(self, path: str) -> Any:
        """Returns what a service answers to a GET; asks again if it cannot connect.

        Raises:
            ServiceError: it does not answer, or with an error.
        """
        try:
            return _get(self._url, path)
        except ConnectionRefusedError:
            time.sleep(_AGAIN_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            raise _unreached(self._url, error) from error
        try:
            return _get(self._url, path)
        except (OSError, http.client.HTTPException) as error:
            raise _unreached(self._url, error) from error


class Episode:
    """An episode that a service plays."""

    def __init__(self, url: str) -> None:
        """Asks nothing yet.

        Args:
            url: of the service.
        """
        self._url, self._path = url, ""
        self._session: Any = None

    async def reset(self, task: protocol.Task) -> tuple[messages.Message, ...]:
        """Begins the episode; waits for a service that is full or away.

        Raises:
            ServiceError: the service does not begin it.
        """
        import aiohttp

        place = dict(task.answer)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(
                total=_CALL_SECONDS, sock_connect=_CONNECT_SECONDS
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FULL_SECONDS
        while True:
            try:
                body = {**place, "id": task.id}
                told = await self._ask("POST", wire.EPISODES, body)
                break
            except ServiceError as error:
                # After another one the service may have begun it.
                has_none = error.code in (_UNCONNECTED, wire.DRAINING, wire.FULL)
                if not has_none or loop.time() > deadline:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
        try:
            self._path = f"{wire.EPISODES}/{told['episode']}"
            return tuple(told["messages"])
        except (LookupError, TypeError) as error:
            raise ServiceError(f"{self._url} began no episode: {error!r}") from error

    async def step(self, message: messages.Message) -> protocol.StepResult:
        """Lets the service answer a turn.

        Raises:
            ServiceError: it does not, or the environment failed there.
            protocol.RewardError: the scoring failed there.
        """
        told = await self._ask("POST", f"{self._path}/step", {"message": message})
        try:
            return wire.read_step(told)
        except ValueError as error:
            raise ServiceError(f"{self._url}: {error}") from error

    async def close(self) -> None:
        """Ends the episode; a service that is away ends it by itself."""
        session, path = self._session, self._path
        self._path = ""
        if session is None:
            return
        try:
            if path:
                await self._ask("DELETE", path, None)
        except ServiceError:
            pass  # it is over, or will be
        finally:
            self._session = None
            await session.close()

    async def _ask(self, method: str, path: str, body: Any) -> Any:
        """Returns the answer; asks again if it cannot connect.

        Raises:
            ServiceError: there is none, or it is an error.
            protocol.RewardError: it is that of scoring.
        """
        import aiohttp

        for is_last in (False, True):
            try:
                return await self._ask_once(method, path, body)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
                if is_last:
                    raise _unreached(self._url, e, _UNCONNECTED) from e
                await asyncio.sleep(_AGAIN_SECONDS)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise _unreached(self._url, error) from error
        raise AssertionError("one of two turns returns or raises")

    async def _ask_once(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **_key()}
        async with self._session.request(
            method, self._url + path, data=data, headers=headers, allow_redirects=False
        ) as found:
            text = bytearray()
            async for part in found.content.iter_any():
                text += part
                if len(text) > _MOST_BYTES:
                    raise ServiceError(f"{self._url}{path}: the answer is too long")
            return _answer(self._url + path, found.status, bytes(text))


def _get(url: str, path: str) -> Any:
    """Returns the answer to a GET.

    Raises:
        OSError, http.client.HTTPException: there is none.
        ServiceError: it is an error.
    """
    parts = urllib.parse.urlsplit(url)
    secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    link = kind(parts.netloc, timeout=_LIST_SECONDS)
    try:
        link.request("GET", parts.path + path, headers=_key())
        found = link.getresponse()
        text = found.read(_MOST_BYTES + 1)
    finally:
        link.close()
    if len(text) > _MOST_BYTES:
        raise ServiceError(f"{url}{path}: the answer is too long")
    return _answer(url + path, found.status, text)


def _answer(url: str, status: int, text: bytes) -> Any:
    """Returns the JSON of an answer.

    Raises:
        ServiceError: it is an error, or no JSON.
        protocol.RewardError: it is that of scoring.
    """
    if status == 204:
        return None
    try:
        told = json.loads(text)
        if 200 <= status < 300:
            return told
        said, code = str(told["error"]["message"]), str(told["error"]["code"] or "")
    except (ValueError, LookupError, TypeError):
        said, code = text[:200].decode(errors="replace"), ""
    if code == wire.UNSCORED:
        raise protocol.RewardError(f"{url}: {said}")
    raise ServiceError(f"{url} answers {status}: {said}", status, code)


def _checked(name: str) -> str:
    """Returns an address without a slash at its end.

    Raises:
        config.InputError: it is none.
    """
    parts = urllib.parse.urlsplit(name)
    try:
        is_address = bool(parts.hostname) and (parts.port or 1) > 0
        (parts.hostname or "").encode("idna")
        is_address &= parts.path.isascii()
    except ValueError:  # of the port, or of a name that no resolver takes
        is_address = False
    if not is_address or parts.query or parts.fragment or parts.username:
        raise config.InputError(
            f"rl.environment={name!r} must be http://HOST:PORT, or https; a key comes "
            f"from ${KEY_VARIABLE}."
        )
    return name.rstrip("/")


def _key() -> dict[str, str]:
    return api_key.header(api_key.given(KEY_VARIABLE))


def _unreached(url: str, error: Exception, code: str = "") -> ServiceError:
    told = f"{url} does not answer: {str(error) or type(error).__name__}"
    return ServiceError(told, code=code)
