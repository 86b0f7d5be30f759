"""The events of a request in a service, and the state of a service."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from glm5_jax.inference import drafter
from glm5_jax.inference.requests import Completion

Reason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """New tokens of a request."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # as in Completion
    versions: tuple[int, ...]  # of the weights that drew them
    raw_logprobs: tuple[float, ...] = ()  # as in Completion; empty without adjustments
    alternatives: tuple[list[tuple[int, float]], ...] = ()  # the same


@dataclasses.dataclass(frozen=True)
class End:
    """The last event of a request."""

    reason: Reason
    completion: Completion  # with all its tokens
    message: str = ""  # of an error


Event = Tokens | End


@dataclasses.dataclass(frozen=True)
class Stats:
    """The state of a service after its last dispatch, and counts since its start."""

    version: int  # of the weights
    running: int  # requests in a slot
    waiting: int  # requests without a slot
    free_slots: int
    free_pages: int  # of the cache, also those kept for later prompts; 0 without pages
    is_paused: bool
    dispatch_seconds: float  # in steps of the engine
    restored: int  # pages that came back from host memory
    preemptions: int  # of requests whose pages older ones needed
    acceptance: drafter.Acceptance  # of drafted tokens
    ended: Mapping[Reason, int]  # requests
    prompt_tokens: int = 0  # that dispatches read
    cached_tokens: int = 0  # of prompts that were in the cache already
    drawn_tokens: int = 0
    dispatches: int = 0
    failures: int = 0  # dispatches that raised


class ClosedError(RuntimeError):
    """Raised if a service takes no more requests or commands."""
