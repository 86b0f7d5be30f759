"""One episode: a coroutine from `reset` to `close` that ends in exactly one label.

In between: prompt -> sample -> parse -> step, turn after turn. How it ends:

    what happens                                            label          reward
    ------------------------------------------------------  -------------  ------------
    the environment terminates                              OK             its own
    the last turn is cut off by its length                  TRUNCATED      0
    ... and the task says pays_when_cut                     TRUNCATED      its own, or 0
    the environment truncates; out of turns; the next       TRUNCATED      its own, or 0
      prompt does not fit the cache
    the environment raises, breaks its protocol, or gives   ENV_ERROR      none
      a first prompt that does not fit the cache
    the environment takes too long                          TIMEOUT        none
    the reward raises, is missing, of a wrong type, not     REWARD_ERROR   none
      finite, or beyond `max_reward`

A `close` that fails or takes too long does not change the label. Errors of the engine
are not the environment's fault and are not caught.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import numbers
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from glm5_jax import config
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.inference import requests
from glm5_jax.rl import agent_session, calls, completer, copies, gateway

_MAX_REASON = 300  # characters
_KEEP = 4  # dispatches that an environment may take before others get the slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The limits of episodes."""

    max_new_tokens: int  # of a turn
    max_turns: int
    num_concurrent: int  # episodes under way; more than slots hide slow environments
    concurrency: tuple[int, ...] = ()  # the same of each part: see RLConfig
    temperature: float = 1.0
    call_timeout: float = 60.0  # seconds for one call of an environment
    episode_timeout: float = 600.0  # seconds for all of an episode's
    max_reward: float = 100.0  # a larger one, or a smaller than minus this, is an error
    # Continues after a turn that was cut off by its length, with <|endoftext|>.
    continue_truncated: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        for name in ("max_new_tokens", "max_turns", "num_concurrent"):
            value = getattr(self, name)
            if value < 1:
                raise config.InputError(f"{name} must be at least 1, got {value}.")
        for name in ("call_timeout", "episode_timeout", "max_reward"):
            value = getattr(self, name)
            if not value > 0:
                raise config.InputError(f"{name} must be positive, got {value}.")


@dataclasses.dataclass(frozen=True)
class Job:
    """An episode to run."""

    task: protocol.Task
    group: int  # episodes of one group are compared with each other
    request_id: int  # of the first turn; the next turns count on, so leave max_turns


@dataclasses.dataclass(frozen=True)
class Episode:
    """The result of a job."""

    task: protocol.Task
    group: int
    samples: list[gateway.Sample]
    reward: protocol.Reward | None  # None where the label says that it does not count
    label: protocol.Label
    num_turns: int
    num_forks: int
    transcript: list[Mapping[str, Any]]  # the messages
    reason: str  # why the label is not OK, or ""
    num_drift_tokens: int
    num_truncated: int  # turns
    close_error: str  # or ""


@runtime_checkable
class Doors(Protocol):
    """Addresses at which agents ask for turns: doors.py."""

    def opened(
        self, session: agent_session.AgentSession
    ) -> contextlib.AbstractAsyncContextManager[str]:
        """Yields the base URL of a session, which ends with the block."""
        ...


@dataclasses.dataclass(frozen=True)
class Context:
    """The objects that all episodes share."""

    engine: completer.Completer
    taskset: protocol.Taskset
    template: templates.Template
    settings: Settings
    # Where agents ask that are programs of their own; None: there are none.
    doors: Doors | None = None

    @functools.cached_property
    def max_characters(self) -> int:
        """The smallest number of characters that never fits the cache."""
        longest = max(map(len, self.template.tokenizer.pieces))
        return self.engine.capacity * longest + 1


async def run(context: Context, job: Job) -> Episode:
    """Plays an episode to its end and always closes its environment."""
    return await _Run(context, job).run()


class _EndError(Exception):
    """Raised to end an episode that does not count."""

    def __init__(self, label: protocol.Label, reason: str) -> None:
        self.label, self.reason = label, reason


_Outcome = tuple[protocol.Label, protocol.Reward | None, str]  # and the reason


class _Run:
    """A running episode."""

    def __init__(self, context: Context, job: Job) -> None:
        self._context, self._job = context, job
        self._taskset, self._task = protocol.part_of(context.taskset, job.task)
        self._settings = context.settings
        self._session = gateway.Session(context.template, job.task.tools)
        self._turns: gateway.Session | agent_session.AgentSession = self._session
        self._messages: list[Mapping[str, Any]] = []
        self._environment: protocol.Environment | protocol.Agent | None = None
        self._seconds_left = context.settings.episode_timeout

    async def run(self) -> Episode:
        try:
            label, reward, reason = await self._play()
        except _EndError as end:
            label, reward, reason = end.label, None, end.reason
        finally:
            close_error = await calls.finished(self._close())
        session = self._turns
        return Episode(
            task=self._job.task,
            group=self._job.group,
            samples=session.samples(),
            reward=reward,
            label=label,
            num_turns=session.num_turns,
            num_forks=session.num_forks,
            transcript=[*self._messages],
            reason=reason,
            num_drift_tokens=session.num_drift_tokens,
            num_truncated=session.num_truncated,
            close_error=close_error,
        )

    async def _play(self) -> _Outcome:
        truncated, reward = protocol.Label.TRUNCATED, protocol.Reward(0.0)
        made = self._environment = self._make()
        if isinstance(made, protocol.Agent):
            return await self._play_agent(made)
        environment = made
        first = await self._call("reset", lambda: environment.reset(self._task))
        self._put(first, "reset")
        for turn in range(self._settings.max_turns):
            prompt = self._prompt()
            room = self._context.engine.capacity - len(prompt)
            if room < 1:
                reason = f"a prompt of {len(prompt)} tokens does not fit the cache"
                if turn == 0:  # nothing was sampled: there is nothing to score
                    raise _EndError(protocol.Label.ENV_ERROR, reason)
                return truncated, reward, reason
            is_cut, message = await self._sample(prompt, room, turn)
            cut = truncated, reward, "a turn was cut off by its length"
            is_unpaid = is_cut and not self._job.task.pays_when_cut
            if is_unpaid and not self._settings.continue_truncated:
                return cut
            result = await self._call(
                "step", functools.partial(environment.step, message)
            )
            if not isinstance(result, protocol.StepResult):
                reason = f"step returned {_shown(result)}"
                raise _EndError(protocol.Label.ENV_ERROR, reason)
            if result.terminated or result.reward is not None:
                reward = self._checked(result.reward)
            is_over = result.terminated or result.truncated
            self._put(result.messages, "step", may_be_empty=is_over)
            if is_cut and (is_over or not self._settings.continue_truncated):
                return cut if is_unpaid else (truncated, reward, cut[-1])
            if result.terminated:
                return protocol.Label.OK, reward, ""
            if result.truncated:
                return truncated, reward, "the environment truncated"
        return truncated, reward, f"no end in {self._settings.max_turns} turns"

    async def _play_agent(self, agent: protocol.Agent) -> _Outcome:
        """Lets a program play; its turns are those that it asks for."""
        doors, task, settings = self._context.doors, self._task, self._settings
        assert doors is not None, "whoever plays agents opens doors"
        session = self._turns = agent_session.AgentSession(
            self._context.engine,
            self._context.template,
            request_id=self._job.request_id,
            max_turns=settings.max_turns,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
        )
        none = protocol.Label.TRUNCATED, protocol.Reward(0.0)
        try:
            async with doors.opened(session) as url:
                result = await self._call(
                    "play",
                    lambda: agent.play(task, url),
                    limit=self._seconds_left,
                )
        except _EndError:
            if session.over:  # it ran out of turns, which is no crash
                return *none, session.over
            raise
        finally:
            self._messages = [*session.transcript]
            if session.error is not None:
                raise session.error
        if not isinstance(result, protocol.StepResult):
            reason = f"play returned {_shown(result)}"
            raise _EndError(protocol.Label.ENV_ERROR, reason)
        if not session.num_turns:
            raise _EndError(protocol.Label.ENV_ERROR, "the agent asked for no turn")
        reward = self._checked(result.reward)
        if result.terminated:
            return protocol.Label.OK, reward, ""
        return protocol.Label.TRUNCATED, reward, session.over or "the agent gave up"

    async def _sample(
        self, prompt: list[int], room: int, turn: int
    ) -> tuple[bool, dict[str, Any]]:
        """Samples a turn; returns whether it was cut off, and its message."""
        request = requests.Request(
            id=self._job.request_id + turn,
            prompt=prompt,
            max_new_tokens=min(self._settings.max_new_tokens, room),
            stop_ids=self._context.template.stop_ids,
            temperature=self._settings.temperature,
            keep=_KEEP if turn + 1 < self._settings.max_turns else 0,
            session=self._job.request_id,
        )
        completion = await self._context.engine.complete(request)
        message = self._session.record(completion)
        self._messages.append(message)
        return completion.finish_reason == "length", copy.deepcopy(message)

    def _make(self) -> protocol.Environment | protocol.Agent:
        try:
            return self._taskset.environment()
        except Exception as error:
            raise _crash("environment", error) from error

    def _put(self, new: Any, call: str, may_be_empty: bool = False) -> None:
        """Appends copies of messages that an environment returned.

        Each takes a token at least, so that as many as the cache has tokens fill it.
        """
        new = self._copied(lambda: new, call)
        if not new and not may_be_empty:
            raise _EndError(protocol.Label.ENV_ERROR, f"{call} returned no message")
        self._messages.extend(new)

    def _copied(self, get: Callable[[], Any], call: str) -> list[dict[str, Any]]:
        try:
            some = itertools.islice(get(), self._context.engine.capacity)
            return [copies.of_message(m, self._context.max_characters) for m in some]
        except Exception as error:
            raise _crash(call, error) from error

    def _prompt(self) -> list[int]:
        shown, editor = self._messages, self._environment
        if isinstance(editor, protocol.Editor):
            shown = self._copied(lambda: editor.shown((*self._messages,)), "shown")
        try:
            return self._session.prompt(shown)
        except (ValueError, TypeError) as error:  # what the template cannot show
            raise _crash("a message", error) from error

    async def _call(
        self, name: str, call: Callable[[], Awaitable[Any]], limit: float | None = None
    ) -> Any:
        """Calls the environment within the remaining time, and `limit` seconds."""
        limit = min(limit or self._settings.call_timeout, self._seconds_left)
        start = time.monotonic()
        try:
            return await calls.bounded(call, limit, guest=self)
        except calls.LateError as error:
            reason = f"{name} {error}"
            raise _EndError(protocol.Label.TIMEOUT, reason) from error
        except protocol.RewardError as error:
            raise _crash(name, error, protocol.Label.REWARD_ERROR) from error
        except Exception as error:
            raise _crash(name, error) from error
        finally:
            self._seconds_left -= time.monotonic() - start

    def _checked(self, reward: Any) -> protocol.Reward:
        """Returns the reward with finite floats."""
        limit = self._settings.max_reward
        try:
            total = _finite(reward.total)
            parts = {str(name): _finite(part) for name, part in reward.parts.items()}
            if abs(total) > limit:
                raise ValueError(f"more than max_reward={limit:g}")
        except Exception as error:
            reason = f"the reward is {_shown(reward)}: {error}"
            raise _EndError(protocol.Label.REWARD_ERROR, reason) from error
        return protocol.Reward(total, parts)

    async def _close(self) -> str:
        """Closes the environment; returns its error or ""."""
        if self._environment is None:
            return ""
        self._seconds_left = self._settings.call_timeout
        try:
            await self._call("close", self._environment.close)
        except _EndError as error:
            return error.reason
        return ""


def _finite(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{value!r} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not finite")
    return float(value)


def _crash(
    name: str, error: Exception, label: protocol.Label = protocol.Label.ENV_ERROR
) -> _EndError:
    return _EndError(label, f"{name}: {_shown(error)}")


def _shown(value: Any) -> str:
    """Returns a short text of an object, whose __repr__ may raise."""
    try:
        return repr(value)[:_MAX_REASON]
    except Exception:
        return f"<{type(value).__name__}>"
