"""Requests to the engine, their checks, and completions."""

import dataclasses
import math
import numbers
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from glm5_jax import config as config_lib
from glm5_jax.inference import constraints

_MAX_INT = 2**31 - 1  # largest int32, which devices compute with
MAX_BIASED = 300  # ids with a bias, of a request
MAX_ADJUSTMENT = 100  # of a logit
MAX_ALTERNATIVES = 20  # likeliest tokens that are reported beside a drawn one
_MAX_FLOAT = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the settings of its continuation."""

    id: int
    prompt: Sequence[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0  # 0 takes the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    # Number of dispatches for which the slot is held after the request, for a prompt
    # that extends this text, as a conversation's next turn does.
    keep: int = 0
    # The random numbers of its tokens depend on it (on the id if it is None), and on
    # their positions.
    seed: int | None = None
    # Id of the conversation's first request, by which a router keeps it on one server.
    session: int | None = None
    # The rest needs an engine whose limits say `with_adjustments`.
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    presence_penalty: float = 0.0  # for tokens that were drawn before
    frequency_penalty: float = 0.0  # the same, once for every time
    repetition_penalty: float = 1.0  # for tokens of the prompt, too; 1 is off
    num_alternatives: int = 0  # likeliest tokens to report beside each drawn one
    # That all drawn tokens follow; its ends must be among the stop ids.
    constraint: constraints.Constraint | None = None

    @property
    def is_penalized(self) -> bool:
        """Returns whether the text changes the probabilities of its tokens."""
        penalties = self.presence_penalty, self.frequency_penalty
        return any(penalties) or self.repetition_penalty != 1

    @property
    def is_adjusted(self) -> bool:
        """Returns whether the request needs an engine with adjustments."""
        is_changed = bool(self.logit_bias) or self.is_penalized or self.constraint
        return bool(is_changed or self.num_alternatives)


@dataclasses.dataclass
class Completion:
    """The continuation of a prompt."""

    tokens: list[int]  # including the stop id
    logprobs: list[float]  # of each token, in the distribution that it was drawn from
    finish_reason: Literal["stop", "length"] | None  # None: not finished
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights
    # For each token: the oldest version of the weights that have read the text before
    # it. It is below the token's own if weights were replaced meanwhile.
    cache_versions: list[int] = dataclasses.field(default_factory=list)
    # With adjustments: the log-prob of each token in the model's own distribution, and
    # the likeliest tokens with theirs.
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = dataclasses.field(
        default_factory=list
    )
    num_cached: int = 0  # tokens of the prompt that were in the cache already
    error: str = ""  # why a constraint could not be followed to its end
    # With with_experts: the experts of each token of prompt and completion except the
    # last, which was never read.
    experts: Int[np.ndarray, "T expert_layers K"] | None = None


def errors(
    request: Request, config: config_lib.ModelConfig, capacity: int
) -> list[str]:
    """Returns what is wrong with a request for a cache of `capacity` tokens.

    The request may come from a user, so every field is checked; one message a field.
    """
    found = [
        *_of_settings(request),
        *_of_stop_ids(request.stop_ids, config.vocab_size),
        *_of_adjustments(request, config.vocab_size),
        *_of_prompt(request, config.vocab_size),
    ]
    if found:
        return found
    size, new = len(request.prompt), request.max_new_tokens
    if size + new > capacity:
        is_model = capacity == config.max_position_embeddings
        what = "model.max_position_embeddings" if is_model else "the cache's capacity"
        found.append(
            f"Prompt {request.id} has {size} tokens; with {new} new ones they exceed "
            f"{what}={capacity}. Shorten it, or lower max_new_tokens."
        )
    return found


def is_int(value: Any) -> bool:
    """Returns whether a value is an integer of Python or numpy, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def require_ints(least: int, **values: Any) -> None:
    """Checks that each value is an int of at least `least` that fits 32 bits.

    Raises:
      InputError: lists all values that are not.
    """
    found = [_of_int(name, value, least) for name, value in values.items()]
    if any(found):
        raise config_lib.InputError("\n".join(filter(None, found)))


def require_positions(config: config_lib.ModelConfig, capacity: int) -> None:
    """Checks that the model has as many positions as the cache.

    Raises:
      InputError: it has fewer.
    """
    limit = config.max_position_embeddings
    if capacity > limit:
        raise config_lib.InputError(
            f"capacity must not exceed model.max_position_embeddings={limit}, got "
            f"{capacity}."
        )


def _of_int(name: str, value: Any, least: int, more: str = "") -> str | None:
    """Returns what is wrong with a field that must be an int of at least `least`."""
    if not is_int(value):
        return f"{name} must be an int, got {_shown(value)}."
    if value < least:
        limit = "must not be negative" if least == 0 else f"must be at least {least}"
        return f"{name} {limit}, got {value}{more}."
    if value > _MAX_INT:
        return f"{name} must be at most 2^31 - 1, got {value}{more}."
    return None


def _of_settings(request: Request) -> Iterator[str]:
    """Yields what is wrong with the sampling settings of a request."""
    if not (is_int(request.id) and 0 <= request.id <= _MAX_INT):
        yield (
            f"A request's id must be an int in 0..2^31 - 1, got {_shown(request.id)}."
        )
    if request.seed is not None and (wrong := _of_int("seed", request.seed, 0)):
        yield wrong
    ints = (("max_new_tokens", 1, ""), ("top_k", 0, "; 0 is off"), ("keep", 0, ""))
    for name, least, more in ints:
        if wrong := _of_int(name, getattr(request, name), least, more):
            yield wrong
    if not 0 <= _number(request.temperature) <= _MAX_FLOAT:
        yield (
            f"temperature must be finite and not negative, got "
            f"{_shown(request.temperature)}."
        )
    if not 0 < _number(request.top_p) <= 1:
        yield (
            f"top_p must lie in (0, 1], got {_shown(request.top_p)}; 1 turns it off."
        )
    if not 0 <= _number(request.min_p) <= 1:
        yield f"min_p must lie in [0, 1], got {_shown(request.min_p)}; 0 is off."


def _of_adjustments(request: Request, vocab_size: int) -> Iterator[str]:
    """Yields what is wrong with bias, penalties and alternatives."""
    bias = request.logit_bias
    if not isinstance(bias, Mapping) or len(bias) > MAX_BIASED:
        yield f"logit_bias must map at most {MAX_BIASED} ids, got {_shown(bias)}."
    elif _not_ids(bias, vocab_size):
        yield (
            f"logit_bias must have ids in 0..{vocab_size - 1} (model.vocab_size), got "
            f"{_shown(_not_ids(bias, vocab_size)[0])}."
        )
    elif not all(abs(_number(x)) <= MAX_ADJUSTMENT for x in bias.values()):
        yield f"logit_bias must lie in -{MAX_ADJUSTMENT}..{MAX_ADJUSTMENT}."
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if not abs(_number(value)) <= MAX_ADJUSTMENT:
            yield (
                f"{name} must lie in -{MAX_ADJUSTMENT}..{MAX_ADJUSTMENT}, got "
                f"{_shown(value)}."
            )
    if not 0 < _number(request.repetition_penalty) <= MAX_ADJUSTMENT:
        yield (
            f"repetition_penalty must lie in (0, {MAX_ADJUSTMENT}], got "
            f"{_shown(request.repetition_penalty)}; 1 is off."
        )
    number = request.num_alternatives
    if not (is_int(number) and 0 <= number <= MAX_ALTERNATIVES):
        yield (
            f"num_alternatives must be an int in 0..{MAX_ALTERNATIVES}, got "
            f"{_shown(number)}."
        )
    constraint = request.constraint
    if constraint is not None and constraint.vocab_size < vocab_size:
        yield (
            f"constraint must have masks for the {vocab_size} ids of "
            f"model.vocab_size, got {constraint.vocab_size}."
        )
    if constraint is not None and not set() < constraint.ends <= {*request.stop_ids}:
        yield "constraint must have ends, and they must be among stop_ids."


def _of_stop_ids(stop_ids: Any, vocab_size: int) -> Iterator[str]:
    """Returns what is wrong with the stop ids; beyond 32 bits they would wrap."""
    if not isinstance(stop_ids, Set | list | tuple):
        yield f"stop_ids must be a set of ints, got {_shown(stop_ids)}."
    elif wrong := _not_ids(stop_ids, vocab_size):
        yield (
            f"stop_ids must be ints in 0..{vocab_size - 1} (model.vocab_size), got "
            f"{_shown(wrong[0])}."
        )


def _of_prompt(request: Request, vocab_size: int) -> Iterator[str]:
    """Yields what is wrong with the prompt, apart from its length."""
    prompt, name = request.prompt, f"Prompt {_shown(request.id)}"
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray):
        yield f"{name} must be a list of token ids, got {_shown(prompt)}."
    elif len(prompt) == 0:
        yield f"{name} is empty; give at least one token."
    elif wrong := _not_ids(prompt, vocab_size):
        what = "the id" if is_int(wrong[0]) else "no id:"
        yield (
            f"{name} has {what} {_shown(wrong[0])}, but ids lie in "
            f"0..{vocab_size - 1} (model.vocab_size)."
        )


def _number(value: Any) -> Any:
    """Returns a number as it is and anything else as NaN, which is in no interval."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return value if is_number else math.nan


def _not_ids(values: Collection, vocab_size: int) -> list:
    """Returns the values that are no ids of the vocabulary."""
    if {type(value) for value in values} == {int}:  # as nearly always: quickly
        return [value for value in values if not 0 <= value < vocab_size]
    return [v for v in values if not (is_int(v) and 0 <= v < vocab_size)]


def _shown(value: Any) -> str:
    """It, in few characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
