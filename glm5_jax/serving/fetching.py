"""Lets other servers read long prompts, and fetches the pages of the cache from them.

Whatever goes wrong, the prompt is read here: an answer may come later, and is never
another one.
"""

import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from concurrent import futures

import numpy as np
from absl import logging

from glm5_jax.inference import handover
from glm5_jax.inference import service as service_lib
from glm5_jax.serving import page_bytes
from glm5_jax.serving.router import balance, upstream

PATH = "/prefill"
OUTCOMES = ("fetched", "failed", "refused", "dropped", "no_server")  # see Fetcher
_BENCH_SECONDS = 5.0  # for which a server that failed is not asked again
_OK, _CONFLICT = 200, 409
_NO_FAULTS = (400, 429)  # of a server: a wrong prompt, and more prompts than it takes
_MAX_SHOWN = 300  # bytes of an error


class StatusError(OSError):
    """Raised if a server answers with another status than success."""

    def __init__(self, status: int, text: str) -> None:
        """Takes the status and the text of an answer."""
        super().__init__(f"status {status}: {text}")
        self.status = status


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Who reads prompts, and which.

    Attributes:
        urls: addresses of the servers.
        api_key: that they ask for.
        least_tokens: new tokens of a prompt, in whole pages, that are worth the way.
        max_seconds: for the pages to come.
        bound: of a server's prompts.
    """

    urls: Sequence[str]
    api_key: str | None = None
    least_tokens: int = 1
    max_seconds: float = 60.0
    bound: balance.Bound = dataclasses.field(default_factory=balance.Bound)


@dataclasses.dataclass
class _Fetch:
    """A prompt that is under way, and the number of requests that wait for it."""

    task: asyncio.Task[None]
    num_waiting: int = 0


class Fetcher:
    """Fetches pages of prompts.

    Attributes:
        outcomes: prompts by what became of them: "fetched"; "failed" (no answer, or an
            error), "refused" (damaged pages, or those of another model or version),
            "dropped" (no room for them) and "no_server" were read here.
        num_pages: that were fetched.
        num_bytes: that were fetched.
    """

    def __init__(
        self, service: service_lib.Service, name: str, settings: Settings
    ) -> None:
        """Asks nobody yet.

        Args:
            service: engine that needs the pages.
            name: of its model.
            settings: who reads prompts.

        Raises:
            InputError: the engine cannot take pages.
        """
        self.form = service.call(lambda engine: engine.view().form).result()
        self._service, self._name, self._settings = service, name, settings
        self._balance = balance.Balance(settings.bound)
        for url in settings.urls:
            self._balance.ring.add(url)
        self._loads = dict.fromkeys(settings.urls, 0)
        self._benched: dict[str, float] = {}  # until when
        self._under_way: dict[bytes, _Fetch] = {}
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.num_pages = self.num_bytes = 0

    async def fetch(self, prompt: Sequence[int]) -> None:
        """Fetches the pages that a prompt begins with and that are not here.

        Requests for the same prompt share the way. The caller submits its request at
        once afterwards: the pages are taken in before it.
        """
        size = self.form.page_size
        tokens = prompt[: (len(prompt) - 1) // size * size]
        if len(tokens) < self._settings.least_tokens:
            return
        first = self._service.num_known(prompt) // size
        if len(tokens) - first * size < self._settings.least_tokens:
            return
        key = np.asarray([first, *tokens]).tobytes()
        fetch = self._under_way.get(key)
        if fetch is None:
            task = asyncio.create_task(self._fetch(tokens, first))
            fetch = self._under_way[key] = _Fetch(task)
        fetch.num_waiting += 1
        try:
            await asyncio.shield(fetch.task)
        finally:
            fetch.num_waiting -= 1
            if not fetch.num_waiting:
                fetch.task.cancel()  # unless it has ended
                del self._under_way[key]

    async def _fetch(self, tokens: Sequence[int], first: int) -> None:
        """Fetches pages from `first` on, and lets the engine take them."""
        url = self._choose(tokens)
        if url is None:
            self.outcomes["no_server"] += 1
            return
        self._loads[url] += 1
        try:
            async with asyncio.timeout(self._settings.max_seconds):
                data = await self._ask(url, tokens, first)
            pages = await asyncio.to_thread(
                page_bytes.decoded, data, self.form, tokens, first
            )
            self._take(tokens, pages, len(data), url)
        except upstream.FAILURES as error:
            self._note("failed", url, error)
        except (page_bytes.DamageError, handover.MismatchError) as error:
            self._note("refused", url, error)
        except service_lib.ClosedError:
            logging.info("The engine has ended and takes no pages.")
        finally:
            self._loads[url] -= 1

    def _choose(self, tokens: Sequence[int]) -> str | None:
        """Returns the server for a text, the same one for those that begin alike."""
        now = asyncio.get_running_loop().time()
        benched = [url for url, until in self._benched.items() if now < until]
        page = np.asarray(tokens[: self.form.page_size]).tobytes()
        key = hashlib.blake2b(page, digest_size=16).hexdigest()
        return self._balance.choose(key, self._loads, benched)

    async def _ask(self, url: str, tokens: Sequence[int], first: int) -> bytearray:
        """Returns the bytes of pages.

        Raises:
            DamageError: there are more than were asked for.
            MismatchError: the server has other weights.
            one of FAILURES: it does not answer.
        """
        fields = {"model": self._name, "token_ids": [*tokens], "first_page": first}
        fields["weight_version"] = self._service.stats().version
        number = len(tokens) // self.form.page_size - first
        most = page_bytes.most_bytes(self.form, number)
        headers = {"Content-Type": "application/json"}
        link = upstream.Upstream(self._settings.api_key)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(link.close)
            body = json.dumps(fields).encode()
            opened = link.open("POST", url + PATH, headers, body)
            found = await stack.enter_async_context(opened)
            data = bytearray()
            async for part in found.content.iter_any():
                data += part
                if len(data) > most:
                    raise page_bytes.DamageError("They are more than were asked for.")
            if found.status == _CONFLICT:
                raise handover.MismatchError(_shown(data))
            if found.status != _OK:
                raise StatusError(found.status, _shown(data))
            return data

    def _take(
        self, tokens: Sequence[int], pages: handover.Pages, num_bytes: int, url: str
    ) -> None:
        """Lets the engine take pages before its next dispatch.

        Raises:
            ClosedError: the engine has ended.
        """
        loop = asyncio.get_running_loop()
        taken = self._service.call(
            lambda engine: handover.take(engine.view(), tokens, pages)
        )

        def note(done: futures.Future[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(self._note_taken, done, num_bytes, url)

        taken.add_done_callback(note)

    def _note_taken(self, done: futures.Future[int], num_bytes: int, url: str) -> None:
        """Counts pages that the engine has taken, or not."""
        error = done.exception()
        if error is not None:
            is_other = isinstance(error, handover.MismatchError)
            self._note("refused" if is_other else "failed", url, error)
            return
        number = done.result()
        self.outcomes["fetched" if number else "dropped"] += 1
        self.num_pages += number
        self.num_bytes += num_bytes

    def _note(self, outcome: str, url: str, error: BaseException) -> None:
        """Counts a prompt that is read here; its server is not asked for a while."""
        self.outcomes[outcome] += 1
        status = getattr(error, "status", None)
        if status not in _NO_FAULTS:
            until = asyncio.get_running_loop().time() + _BENCH_SECONDS
            self._benched[url] = until
        shown = str(error) or "no answer in time"
        logging.warning("A prompt is read here: %s: %s", url, shown)


def _shown(data: bytearray) -> str:
    """Returns the beginning of an answer that is no success."""
    return data[:_MAX_SHOWN].decode("utf-8", "replace")
