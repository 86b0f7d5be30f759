"""Completes prompts at a server, or at a router before several, by token ids.

The request is vLLM's /inference/v1/generate. Nothing here imports jax.
"""

import asyncio
import base64
import time
from collections.abc import Mapping
from typing import Any, Literal, cast

import aiohttp
import numpy as np

from glm5_jax import config
from glm5_jax.inference import requests
from glm5_jax.rl import completer

GENERATE, MODELS = "/inference/v1/generate", "/v1/models"
SESSION = "X-Session-ID"  # of the router: requests of one stay on one server
_BUSY = frozenset((429, 503))  # comes again
_REFUSED = frozenset((400, 404, 413, 422))  # comes never
_MAX_WAIT = 5.0  # seconds between attempts at a busy server, at most
_SHOWN = 300  # characters of an answer that is no completion
# A server may close a connection that was kept just as a request comes on it.
_MAX_DISCONNECTED = 3  # times in a row, after which it is lost


class Remote:
    """The servers behind a URL, as a `completer.Completer`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        capacity: int,
        *,
        seconds: float,
        with_experts: bool = False,
    ) -> None:
        """Asks nothing yet.

        Args:
          session: with the key of the servers among its headers, if they have one.
          url: http://HOST:PORT.
          capacity: most tokens of a prompt and its completion.
          seconds: for an answer, in which a busy server is asked again.
          with_experts: whether to ask for the experts of each token.
        """
        self._session, self._url, self.capacity = session, url.rstrip("/"), capacity
        self._seconds, self._with_experts = seconds, with_experts
        self.versions_ahead = 0  # the servers' number of a version, minus the run's
        self.weight_version: int | None = None  # the run's, of all tokens; None: any

    async def complete(self, request: requests.Request) -> requests.Completion:
        """Returns the completion of a request; ends the request if cancelled.

        Raises:
          InputError: the servers refuse the request.
          EngineError: they do not answer, or answer nonsense.
        """
        deadline, attempt = time.monotonic() + self._seconds, 0
        num_disconnected = 0
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late()
            try:
                status, answer, wait = await self._ask(request, left)
            except aiohttp.ServerDisconnectedError as error:
                num_disconnected += 1
                if num_disconnected == _MAX_DISCONNECTED:
                    raise self._lost(error) from error
                continue
            if status == 200:
                return self._completion(answer, len(request.prompt))
            if status in _REFUSED:
                raise config.InputError(f"{self._url} refuses a request: {answer}")
            if status not in _BUSY:
                raise completer.EngineError(f"{self._url} answers {status}: {answer}")
            attempt += 1
            wait = max(wait, 0.05 * 2 ** min(attempt, 10))  # 2^1024 is no float
            await asyncio.sleep(min(wait, _MAX_WAIT, left))

    async def _ask(
        self, request: requests.Request, seconds: float
    ) -> tuple[int, Any, float]:
        """Returns status, answer, and the seconds to wait if it is busy.

        Raises:
          ServerDisconnectedError: the server has closed the connection.
          EngineError: there is no answer for another reason.
        """
        limit = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.post(
                self._url + GENERATE,
                json=self._body(request),
                headers={}
                if request.session is None
                else {SESSION: f"{request.session}"},
                timeout=limit,
            ) as response:
                wait = response.headers.get("Retry-After", "0")
                seconds = float(wait) if wait.isdigit() else 0.0
                if response.status == 200:
                    answer = await response.json()
                else:
                    answer = (await response.text())[:_SHOWN]
                return response.status, answer, seconds
        except aiohttp.ServerDisconnectedError:
            raise
        except TimeoutError as error:
            raise self._late() from error
        except (aiohttp.ClientError, ValueError) as error:
            raise self._lost(error) from error

    def _late(self) -> completer.EngineError:
        return completer.EngineError(
            f"{self._url} has not completed a request for {self._seconds:g} s: if "
            f"answers may take so long, raise rl.answer_timeout_seconds."
        )

    def _lost(self, error: Exception) -> completer.EngineError:
        shown = str(error) or type(error).__name__
        return completer.EngineError(f"{self._url} is lost: {shown}")

    def _body(self, request: requests.Request) -> Mapping[str, Any]:
        """Returns what asks for exactly this: no default of the server is left."""
        pinned = {}
        if self.weight_version is not None:
            pinned = {"weight_version": self.weight_version + self.versions_ahead}
        return {
            "token_ids": [*request.prompt],
            "sampling_params": {
                "max_tokens": request.max_new_tokens,
                "temperature": request.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "seed": request.id,
                "ignore_eos": True,
                "stop_token_ids": sorted(request.stop_ids),
                "logprobs": 1,
                **pinned,
            },
            "return_routed_experts": self._with_experts,
        }

    def _completion(self, answer: Any, num_tokens: int) -> requests.Completion:
        """Returns the only choice of an answer to a prompt of so many tokens.

        Raises:
          EngineError: it has another form.
        """
        try:
            (choice,) = answer["choices"]
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            # A server that does not tell is taken to have had everything.
            num_cached = int(details.get("cached_tokens", num_tokens))
            content = choice["logprobs"]["content"]
            reason = choice["finish_reason"]
            if reason not in ("stop", "length"):
                raise completer.EngineError(f"{self._url} ended a request: {reason}")
            return requests.Completion(
                tokens=choice["token_ids"],
                logprobs=[row["logprob"] for row in content],
                finish_reason=cast(Literal["stop", "length"], reason),
                versions=[v - self.versions_ahead for v in choice["weight_versions"]],
                cache_versions=[
                    v - self.versions_ahead for v in choice["cache_versions"]
                ],
                num_cached=num_cached,
                experts=_experts(choice) if self._with_experts else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise completer.EngineError(
                f"{self._url} answers {GENERATE} in another form: {error!r}"
            ) from error


async def capacity_of(session: aiohttp.ClientSession, url: str) -> int:
    """Returns the most tokens that the servers behind a URL hold of a sequence.

    Raises:
      EngineError: they do not tell.
    """
    try:
        async with session.get(url.rstrip("/") + MODELS) as response:
            response.raise_for_status()
            found = (await response.json())["data"]
            return min(int(model["max_model_len"]) for model in found)
    except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
        raise completer.EngineError(f"{url} does not tell its models: {error!r}") from (
            error
        )


def _experts(choice: Mapping[str, Any]) -> np.ndarray:
    packed = choice["routed_experts"]
    data = np.frombuffer(base64.b64decode(packed["data"]), "<u2")
    return data.reshape(packed["shape"]).astype(np.int32)
