"""The fields that requests of several forms have, checked for their types."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from glm5_jax.http_server import errors
from glm5_jax.inference import constraints, requests
from glm5_jax.serving import served

_MAX_CHOICES = 64
_MAX_STOP_STRINGS = 16
_SETTINGS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_MAX_DIGITS = 12  # of an id, beyond any vocabulary
_NUM_SEEDS = 2**31  # of the engine


class Body(pydantic.BaseModel):
    """A body whose unknown fields are ignored, as other servers do."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_text(cls, data: Any) -> Any:
        """Refuses what JSON can write but no text has, and endless nesting."""
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string has half of a surrogate pair") from None
        except RecursionError:
            raise ValueError("lists and objects are nested too deeply") from None
        return data


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False


class Sampling(Body):
    """The settings of a continuation; None takes the model's own default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None  # by id, which JSON writes as a string
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False  # draws max_tokens, whatever the model's own end tokens
    stream: bool | None = None
    weight_version: int | None = None  # of the weights that draw all of it; None: any
    # The form of the answer, see structured.py.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def num_choices(self) -> int:
        """Returns the number of answers.

        Raises:
            ApiError: it is below 1 or too large.
        """
        number = 1 if self.n is None else self.n
        if not 1 <= number <= _MAX_CHOICES:
            raise errors.bad_request(f"n must lie in 1..{_MAX_CHOICES}, got {number}.")
        return number

    @property
    def stop_strings(self) -> Sequence[str]:
        """Returns the stop strings.

        Raises:
            ApiError: one is empty, or there are too many.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stop or len(stop) > _MAX_STOP_STRINGS:
            raise errors.bad_request(
                f"stop must have at most {_MAX_STOP_STRINGS} strings, none of them "
                f"empty."
            )
        return stop

    def requests(
        self,
        model: served.Served,
        prompt: Sequence[int],
        max_tokens: int | None,
        stop_ids: frozenset[int],
        num_alternatives: int | None = None,
        constraint: constraints.Constraint | None = None,
    ) -> list[requests.Request]:
        """Returns one request for each choice.

        Args:
            model: that is served.
            prompt: ids.
            max_tokens: of an answer; None takes what the cache has room for.
            stop_ids: of the model; the body's are added.
            num_alternatives: of `Request`; None is 0.
            constraint: of `Request`.

        Raises:
            ApiError: the prompt is too long.
        """
        room = model.room(len(prompt))
        if max_tokens is not None and max_tokens > room:
            raise errors.bad_request(
                f"The prompt has {len(prompt)} tokens, so at most {room} more fit into "
                f"the {model.service.capacity} of this server; got "
                f"max_tokens={max_tokens}.",
                "context_length_exceeded",
            )
        settings: dict[str, Any] = {**model.defaults}
        settings["num_alternatives"] = num_alternatives or 0
        for name in _SETTINGS:
            if (value := getattr(self, name)) is not None:
                settings[name] = value
        if self.logit_bias:
            settings["logit_bias"] = _by_id(self.logit_bias)
        own = frozenset() if self.ignore_eos else stop_ids
        ends = own | frozenset(self.stop_token_ids or ())
        if constraint is not None:  # ends a text that is complete
            ends |= constraint.ends
            settings["constraint"] = constraint
        seed = self._seed(model)
        return [
            requests.Request(
                id=model.service.new_id(),
                prompt=prompt,
                max_new_tokens=room if max_tokens is None else max_tokens,
                stop_ids=ends,
                seed=None if seed is None else (seed + choice) % _NUM_SEEDS,
                **settings,
            )
            for choice in range(self.num_choices)
        ]

    def _seed(self, model: served.Served) -> int | None:
        """Returns the first choice's seed; None takes the engine's next number."""
        if self.seed is None and not model.is_seeded:  # ids begin anew in each process
            return secrets.randbelow(_NUM_SEEDS)
        return self.seed


def _by_id(bias: Mapping[str, float]) -> dict[int, float]:
    """Returns a bias with its ids as numbers.

    Raises:
        ApiError: an id is not a number, or beyond any vocabulary.
    """
    wrong = [x for x in bias if not x.isdecimal() or len(x) > _MAX_DIGITS]
    if wrong:
        raise errors.bad_request(
            f"logit_bias must have token ids as its keys, got {wrong[0][:60]!r}."
        )
    return {int(name): value for name, value in bias.items()}
