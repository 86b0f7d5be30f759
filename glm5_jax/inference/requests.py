"""What the engine is asked for, and what it gives."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int

from glm5_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue, and how."""

    id: int  # the random numbers of its tokens depend on it, and on their positions
    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0  # 0 takes the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0


@dataclasses.dataclass
class Completion:
    """What followed a prompt."""

    tokens: list[int]  # the one that stopped it included
    logprobs: list[float]  # of each token, in the distribution that it was drawn from
    finish_reason: Literal["stop", "length"] | None  # None: not finished
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights
    # Where the engine records them: experts that each token of prompt and completion
    # went to, but for the last, which was never read. [T, M, K], M layers with experts.
    experts: Int[np.ndarray, "T M K"] | None = None


def errors(
    request: Request, config: config_lib.ModelConfig, capacity: int
) -> list[str]:
    """What keeps a request from being continued in a cache of `capacity` tokens."""
    found, prompt, name = [], request.prompt, f"Prompt {request.id}"
    if request.max_new_tokens < 1:
        found.append(
            f"max_new_tokens must be at least 1, got {request.max_new_tokens}."
        )
    if not 0 <= request.temperature < math.inf:
        found.append(
            f"temperature must be finite and not negative, got {request.temperature}."
        )
    if request.top_k < 0:
        found.append(f"top_k must not be negative, got {request.top_k}; 0 is off.")
    if not 0 <= request.min_p <= 1:
        found.append(f"min_p must lie in [0, 1], got {request.min_p}; 0 is off.")
    if not 0 <= request.id < 2**31:
        found.append(f"A request's id must lie in 0..2^31 - 1, got {request.id}.")
    if not 0 < request.top_p <= 1:
        found.append(f"top_p must lie in (0, 1], got {request.top_p}; 1 turns it off.")
    unknown = [t for t in prompt if not 0 <= t < config.vocab_size]
    if len(prompt) == 0:
        found.append(f"{name} is empty; give at least one token.")
    if unknown:
        found.append(
            f"{name} has the id {unknown[0]}, but ids lie in "
            f"0..{config.vocab_size - 1} (model.vocab_size)."
        )
    if len(prompt) + request.max_new_tokens > capacity:
        is_model = capacity == config.max_position_embeddings
        what = "model.max_position_embeddings" if is_model else "the cache's capacity"
        found.append(
            f"{name} has {len(prompt)} tokens; with {request.max_new_tokens} new ones "
            f"they exceed {what}={capacity}. Shorten it, or lower max_new_tokens."
        )
    return found
