"""The episodes that a service plays for its clients.

An episode ends with its client's word, with a failure, when a client leaves in the
middle of a step, or when nobody asks for it for a while; then its environment, and any
sandbox with it, is closed. One that is over closes its environment at once and keeps
its reward until it ends.
"""

import asyncio
import collections
import dataclasses
import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from absl import logging

from glm5_jax import config, messages
from glm5_jax.config import checks
from glm5_jax.environments import protocol
from glm5_jax.environments.service import wire

_T = TypeVar("_T")
_CANCEL_SECONDS = 1.0  # for a call that is cancelled to end
# How an episode ended, for the figures.
ENDED, IDLE, LEFT, FAILED, LATE = "ended", "idle", "left", "failed", "late"
ENDINGS = (ENDED, IDLE, LEFT, FAILED, LATE)


class RefusedError(Exception):
    """Raised when an episode cannot do what is asked of it."""

    def __init__(self, code: str, message: str) -> None:
        """Takes a code of wire.py and a text for people."""
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of the episodes of a service."""

    max_episodes: int = 256  # at a time
    call_seconds: float = 300.0  # for one call of an environment
    idle_seconds: float = 900.0  # without a request, after which an episode ends

    def __post_init__(self) -> None:
        """Checks the bounds.

        Raises:
            config.InputError: one is not positive.
        """
        checks.require(
            *(
                (value > 0, f"--{name} must be positive, got {value}.")
                for name, value in vars(self).items()
            )
        )


class Episode:
    """An episode of a client."""

    def __init__(
        self, key: str, task: protocol.Task, environment: protocol.Environment
    ) -> None:
        """Takes the parts of an episode that has not begun."""
        self.key, self.task, self.environment = key, task, environment
        self.history: list[messages.Message] = []
        self.last: protocol.StepResult | None = None  # once it is over
        self.num_turns = 0
        self.is_busy = True
        self.is_closed = False
        self.timer: asyncio.TimerHandle | None = None
        self.call: asyncio.Task[Any] | None = None  # of its environment


class Episodes:
    """All episodes of a service; a running event loop is needed.

    Attributes:
        is_draining: whether no more of them begin.
        num_begun: of all time.
        num_refused: that could not begin, as there was no room.
        num_steps: of all episodes.
        endings: episodes by how they ended.
    """

    def __init__(self, taskset: protocol.Taskset, limits: Limits) -> None:
        """Begins without an episode."""
        self._taskset, self._limits = taskset, limits
        self._all: dict[str, Episode] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._secret = secrets.token_bytes(32)
        self.is_draining = False
        self.num_begun = self.num_refused = self.num_steps = 0
        self.endings: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """Returns the number of episodes that have not ended."""
        return len(self._all)

    def told_task(self, task: protocol.Task) -> dict[str, Any]:
        """Returns what a client may know of a task.

        A digest with a secret of this process tells tasks that ask the same, and
        nothing of the answer, however few answers there may be.
        """
        words = task.problem or json.dumps(
            [[*task.messages], task.answer], sort_keys=True, default=repr
        )
        digest = hmac.new(self._secret, words.encode(), hashlib.sha256)
        return wire.told_task(task, digest.hexdigest()[:32])

    def task(self, split: str, seed: int, index: int) -> protocol.Task:
        """Returns a task of the taskset.

        Raises:
            RefusedError: the split has none.
        """
        try:
            return self._taskset.task(split, seed, index)
        except config.InputError as error:
            raise RefusedError(wire.UNKNOWN_TASK, str(error)) from error

    async def begin(self, split: str, seed: int, index: int, task_id: str) -> Episode:
        """Begins an episode; its history has the first messages.

        Args:
            split: of the task.
            seed: of the task.
            index: of the task.
            task_id: what the client takes for the task's id; "": it does not know.

        Raises:
            RefusedError: there is no room, or another task than the client knows.
            Exception: the environment's.
        """
        if self.is_draining:
            raise RefusedError(wire.DRAINING, "The service is about to end.")
        if len(self._all) >= self._limits.max_episodes:
            self.num_refused += 1
            most = self._limits.max_episodes
            raise RefusedError(
                wire.FULL, f"There are {most} episodes already; ask later."
            )
        task = self.task(split, seed, index)
        if task_id not in ("", task.id):
            raise RefusedError(
                wire.UNKNOWN_TASK,
                f"The task is {task.id!r} here, and not {task_id!r}: the service has "
                f"another taskset by now.",
            )
        environment = self._taskset.environment()
        assert isinstance(environment, protocol.Environment)
        key = secrets.token_urlsafe(16)
        made = self._all[key] = Episode(key, task, environment)
        self.num_begun += 1

        async def first() -> list[messages.Message]:
            return _plain([*await environment.reset(task)])

        made.history += await self._call(made, first)
        self._rest(made)
        return made

    async def step(self, key: str, message: messages.Message) -> dict[str, Any]:
        """Returns the environment's answer to a turn.

        Raises:
            RefusedError: there is no such episode, it is over, or a step is under way.
            Exception: the environment's, which ends the episode.
        """
        episode = self.found(key)
        if episode.is_busy:
            raise RefusedError(wire.BUSY, "Another step of the episode is under way.")
        if episode.last is not None:
            raise RefusedError(wire.OVER, "The episode is over.")
        self._wake(episode)
        self.num_steps += 1
        episode.num_turns += 1
        environment = episode.environment

        async def answer() -> dict[str, Any]:
            result = await environment.step(message)
            if result.terminated or result.truncated:
                episode.last = result
            return _plain(wire.told_step(result))

        told = await self._call(episode, answer)
        episode.history += [message, *told["messages"]]
        if episode.last is not None:
            self._close(episode)
        self._rest(episode)
        return told

    def found(self, key: str) -> Episode:
        """Returns an episode, which may then be idle as long again.

        Raises:
            RefusedError: there is none.
        """
        if key not in self._all:
            raise RefusedError(
                wire.UNKNOWN_EPISODE, "There is no such episode; it may have ended."
            )
        episode = self._all[key]
        if not episode.is_busy:
            self._rest(episode)
        return episode

    def drain(self) -> None:
        """Begins no more episodes; those under way go on."""
        self.is_draining = True

    def end(self, key: str) -> None:
        """Ends an episode.

        Raises:
            RefusedError: there is none.
        """
        self._drop(self.found(key), ENDED)

    async def close(self) -> None:
        """Ends all episodes, and waits until their environments are closed."""
        for episode in [*self._all.values()]:
            self._drop(episode, ENDED)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _call(self, episode: Episode, call: Callable[[], Awaitable[_T]]) -> _T:
        """Returns what a call of the environment does; a failure ends the episode.

        Raises:
            TimeoutError: it took too long.
            RefusedError: the client ended the episode meanwhile.
            Exception: what it raised.
        """
        ending = LEFT  # of the client, who cancels this
        task = episode.call = _begun(call)
        try:
            found = await _bounded(task, self._limits.call_seconds)
            ending = ""
        except TimeoutError:
            ending = LATE
            raise
        except Exception:
            ending = FAILED
            raise
        finally:
            if ending:
                self._drop(episode, ending)
        return found

    def _wake(self, episode: Episode) -> None:
        episode.is_busy = True
        if episode.timer is not None:
            episode.timer.cancel()

    def _rest(self, episode: Episode) -> None:
        """Lets an episode wait for its client, who may have ended it meanwhile."""
        if episode.key not in self._all:
            return
        self._wake(episode)
        episode.is_busy = False
        loop = asyncio.get_running_loop()
        episode.timer = loop.call_later(
            self._limits.idle_seconds, self._drop, episode, IDLE
        )

    def _drop(self, episode: Episode, ending: str) -> None:
        """Forgets an episode and closes its environment, beside what is under way."""
        if self._all.pop(episode.key, None) is None:
            return
        self._wake(episode)
        if episode.call is not None:
            episode.call.cancel()
        self.endings[ending] += 1
        self._close(episode)

    def _close(self, episode: Episode) -> None:
        """Begins to close the environment of an episode, once."""
        if episode.is_closed:
            return
        episode.is_closed = True

        async def close() -> None:
            try:
                task = _begun(episode.environment.close)
                await _bounded(task, self._limits.call_seconds)
            except Exception:
                logging.exception("The environment of %s: close", episode.task.id)

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _begun(call: Callable[[], Awaitable[_T]]) -> asyncio.Task[_T]:
    """Returns a task that makes a call."""

    async def run() -> _T:
        return await call()

    return asyncio.create_task(run())


async def _bounded(task: asyncio.Task[_T], seconds: float) -> _T:
    """Returns a task's result; one that ignores its cancellation is abandoned.

    Raises:
        TimeoutError: it took longer.
        RefusedError: it was cancelled, as its episode was ended.
        Exception: the task's.
    """
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise RefusedError(wire.UNKNOWN_EPISODE, "The episode was ended meanwhile.")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)


def _plain(said: Any) -> Any:
    """Returns what a client reads.

    Raises:
        TypeError: it cannot be written as JSON.
        ValueError: a number of it is none.
    """
    return json.loads(json.dumps(said, allow_nan=False))
