"""Token in, token out: the ids of an episode, each recorded once.

The learner gets the sampled ids exactly as the engine returned them, with the stop
token. The next prompt is the last prompt, the sampled ids, and a bridge, which has the
ids of the new messages:

    prompt_{t+1} = prompt_t + sampled_t + bridge_t

Nothing is tokenised twice, because the second time a text may give other tokens than
the sampled ones, and those have no log-probs.

If the conversation does not continue the sampled ids (the template hides the reasoning
of earlier turns, or someone rewrote the history), the episode forks. The ids so far are
one sample. The new prompt, rendered as a whole, begins another sample, in which only
the ids sampled from then on are trained.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from glm5_jax import messages as messages_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import requests

NOT_SAMPLED = -1  # the version of a token that was not sampled
_MAX_LOGPROB = 1e-3  # 0 but for rounding


class MisalignedError(Exception):
    """Raised if the lengths of an engine's results do not match."""


@dataclasses.dataclass
class Sample:
    """The token ids of one conversation, with the data of each token."""

    tokens: list[int]
    mask: list[bool]  # sampled, and so trained
    logprobs: list[float]  # 0 where nothing was sampled
    versions: list[int]  # of the weights that sampled them; else NOT_SAMPLED
    # Experts of all tokens but the last, where the engine records them: [T-1, M, K].
    experts: np.ndarray | None = None
    # The oldest weights that have read the text before a sampled token; by default, and
    # unless weights were replaced meanwhile, those that sampled it.
    cache_versions: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        """Takes the default of cache_versions."""
        self.cache_versions = self.cache_versions or [*self.versions]

    @property
    def oldest_version(self) -> int | None:
        """Returns that of the oldest weights of a sampled token; None: there is none.

        A token's weights are those that sampled it, and those that read the text before
        it.
        """
        return min(itertools.compress(self.cache_versions, self.mask), default=None)

    def check(self) -> "Sample":
        """Returns itself.

        Raises:
            MisalignedError: the lengths differ.
        """
        lengths = {
            "tokens": len(self.tokens),
            "mask": len(self.mask),
            "logprobs": len(self.logprobs),
            "versions": len(self.versions),
            "cache_versions": len(self.cache_versions),
        }
        if self.experts is not None:
            lengths["experts"] = len(self.experts) + 1
        if len(set(lengths.values())) > 1:
            raise MisalignedError(f"A sample must have one length, got {lengths}.")
        return self


@dataclasses.dataclass(frozen=True)
class _Prompt:
    """A prompt that waits for the engine's answer."""

    ids: list[int]
    messages: list[messages_lib.Message]
    is_fork: bool


class Session:
    """The ids of one episode: call `prompt`, then `record`, for every turn.

    Attributes:
        num_turns: turns that were sampled.
        num_forks: prompts that did not continue the sampled ids.
        num_drift_tokens: sampled tokens that tokenising the turn's text would change,
            counted from the first such token to the turn's end.
        num_truncated: turns that were cut off by their length.
    """

    def __init__(
        self, template: templates.Template, tools: messages_lib.Tools = ()
    ) -> None:
        """Starts an empty conversation; the prompt shows `tools` to the model."""
        self._template, self._tools = template, tuple(tools)
        self.num_turns = self.num_forks = 0
        self.num_drift_tokens = self.num_truncated = 0
        self._samples: list[Sample] = []
        self._history: list[messages_lib.Message] = []  # what the last sample spells
        self._prompt: _Prompt | None = None
        self._is_thinking: bool  # the last turn was asked for with a thought,
        self._is_open: bool  # ... and was cut off in it

    def prompt(self, messages: Sequence[messages_lib.Message]) -> list[int]:
        """Returns the ids of the prompt for the next turn.

        Only `record` counts a turn, so `prompt` may be called again.

        Args:
            messages: the whole conversation, with the turns that `record` returned.

        Raises:
            InputError: the template cannot render a message.
        """
        messages = list(messages)
        if self._samples and self._goes_on(messages):
            bridge = self._bridge(messages[len(self._history) :])
            ids, is_fork = [*self._samples[-1].tokens, *bridge], False
        else:
            ids, is_fork = self._render(messages, True), bool(self._samples)
        self._prompt = _Prompt(ids, messages, is_fork)
        return list(ids)

    def record(self, completion: requests.Completion) -> dict[str, Any]:
        """Records the completion of the last prompt; returns its message.

        Raises:
            MisalignedError: it is not one turn with one value for each token.
        """
        assert self._prompt is not None, "record needs a prompt before it"
        prompt, self._prompt = self._prompt, None
        _check(completion, self._template.stop_ids, len(prompt.ids))
        if prompt.is_fork or not self._samples:
            self._samples.append(Sample([], [], [], []))
        sample = self._samples[-1]
        size = len(sample.tokens)
        assert prompt.ids[:size] == sample.tokens, "a prompt must extend its sample"
        num_new = len(prompt.ids) - size
        sample.tokens += prompt.ids[size:] + completion.tokens
        sample.mask += [False] * num_new + [True] * len(completion.tokens)
        sample.logprobs += [0.0] * num_new + completion.logprobs
        sample.versions += [NOT_SAMPLED] * num_new + completion.versions
        caches = completion.cache_versions or completion.versions
        sample.cache_versions += [NOT_SAMPLED] * num_new + caches
        sample.experts = completion.experts
        sample.check()

        special_ids = self._template.tokenizer.special_ids
        self._is_thinking = prompt.ids[-1] == special_ids["<think>"]
        is_closed = special_ids["</think>"] in completion.tokens
        self._is_open = self._is_thinking and not is_closed
        template = dataclasses.replace(
            self._template, enable_thinking=self._is_thinking
        )
        message = template.parse(completion.tokens, self._tools)
        self._history = [*prompt.messages, message]
        self.num_turns += 1
        self.num_forks += prompt.is_fork
        self.num_drift_tokens += _drift(completion, template.render([message]))
        self.num_truncated += completion.finish_reason == "length"
        return message

    def samples(self) -> list[Sample]:
        """Returns one sample, and one for each fork; each ends with a sampled id."""
        return [sample.check() for sample in self._samples]

    def _goes_on(self, messages: list[messages_lib.Message]) -> bool:
        """Tells whether the template renders `messages` after an unchanged history."""
        size = len(self._history)
        roles = {message.get("role") for message in messages[size:]}
        if not roles or "assistant" in roles or messages[:size] != self._history:
            return False
        if "user" not in roles or not self._template.clear_thinking:
            return True  # only a user's message hides thoughts before it
        shown = self._render(self._history)
        return self._render(messages)[: len(shown)] == shown

    def _bridge(self, new: list[messages_lib.Message]) -> list[int]:
        """Returns the ids between the last turn and the next one."""
        tokens = self._samples[-1].tokens
        if new[0].get("role") != "user":  # the switch of the user's message still holds
            new = [{"enable_thinking": self._is_thinking, **new[0]}, *new[1:]]
        return self._template.bridge(new, tokens[-1], is_thinking=self._is_open)

    def _render(
        self, messages: list[messages_lib.Message], add_generation_prompt: bool = False
    ) -> list[int]:
        return self._template.render(
            messages, self._tools, add_generation_prompt
        ).tokens


def _drift(completion: requests.Completion, rendered: templates.Rendered) -> int:
    """Returns how many tokens of a turn differ from its message tokenised again."""
    sampled = completion.tokens[
        : len(completion.tokens) - (completion.finish_reason == "stop")
    ]
    pairs = zip(rendered.tokens, rendered.mask, strict=True)
    targets = [token for token, is_target in pairs if is_target]
    same = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(sampled, targets, strict=False)
    )
    return len(sampled) - len(list(same))


def _check(
    completion: requests.Completion, stop_ids: frozenset[int], prompt_size: int
) -> None:
    """Raises MisalignedError unless it is one turn with one value for each token."""
    tokens, reason = completion.tokens, completion.finish_reason
    size = len(tokens)
    experts = completion.experts
    num_stops = sum(token in stop_ids for token in tokens)
    is_stopped = bool(tokens) and tokens[-1] in stop_ids
    errors = [
        message
        for holds, message in (
            (size > 0, "no tokens"),
            (reason in ("stop", "length"), f"the finish reason {reason!r}"),
            (len(completion.logprobs) == size, f"{len(completion.logprobs)} log-probs"),
            (len(completion.versions) == size, f"{len(completion.versions)} versions"),
            (
                experts is None or len(experts) == prompt_size + size - 1,
                f"experts of {0 if experts is None else len(experts)} tokens",
            ),
            (
                all(math.isfinite(x) and x < _MAX_LOGPROB for x in completion.logprobs),
                "log-probs that are not finite or above 0",
            ),
            (
                num_stops == (reason == "stop") and is_stopped == (reason == "stop"),
                f"{num_stops} stop tokens for the finish reason {reason!r}",
            ),
        )
        if not holds
    ]
    if errors:
        raise MisalignedError(
            f"A completion of {size} tokens behind {prompt_size} of the prompt has "
            f"{', '.join(errors)}; the engine is wrong, or has other stop ids than the "
            f"template."
        )
