"""The model interface of lm-eval, EleutherAI's evaluation harness.

    pip install "glm5_jax[lm_eval]"

    model = harness.Harness(subject.load("runs/NAME"))
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])

A text begins with <|endoftext|> where a task gives no context. A context that is too
long loses its beginning.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api import instance, model

from glm5_jax.evals import answering, likelihood, record

_BATCH = 16  # requests that are scored at once
_MAX_NEW_TOKENS = 256  # where a task names no number


class Harness(model.LM):
    """A model of this package as lm-eval sees it."""

    def __init__(self, subject: record.Subject) -> None:
        """Wraps a model that has a tokenizer."""
        super().__init__()
        self._subject, self._tokenizer = subject, subject.words
        self._limit = subject.config.max_position_embeddings

    def loglikelihood(
        self, requests: Sequence[instance.Instance]
    ) -> list[tuple[float, bool]]:
        """Returns log p(continuation | context), and whether it is the greedy one."""
        encode, pairs = self._tokenizer.encode, []
        for context, continuation in (request.args for request in requests):
            # A blank between the two belongs to the continuation's first token.
            kept = context.rstrip()
            ids = encode(context[len(kept) :] + continuation)
            prompt = encode(kept) or [self._tokenizer.eos_id]
            pairs.append((prompt[-max(self._limit - len(ids), 1) :], ids))
        return [(value, bool(greedy)) for value, greedy in self._scored(pairs, True)]

    def loglikelihood_rolling(
        self, requests: Sequence[instance.Instance]
    ) -> list[float]:
        """Returns log p of each text, in windows that overlap as little as possible."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self._tokenizer.encode(text),
                prefix_token=self._tokenizer.eos_id,
                max_seq_len=self._limit - 1,
                context_len=1,
            )
            pairs = [utils.make_disjoint_window(window) for window in windows]
            found.append(sum(one.value for one in self._scored(pairs, False)))
        return found

    def generate_until(self, requests: Sequence[instance.Instance]) -> list[str]:
        """Returns greedy continuations, up to the first of a task's stop texts."""
        tasks = []
        for context, settings in (request.args for request in requests):
            new = settings.get("max_gen_toks") or _MAX_NEW_TOKENS
            least = min(new, max(self._limit // 4, 1))  # a longer answer cuts no prompt
            ids = self._tokenizer.encode(context) or [self._tokenizer.eos_id]
            ids = ids[least - self._limit :]
            tasks.append(record.Task(ids, (), min(new, self._limit - len(ids))))
        numbered = [*enumerate(tasks)]
        answers = dict(answering.generated(self._subject, numbered, lambda *_: 0.0))
        texts = []
        for i, request in enumerate(requests):
            text = answers[i].text
            for stop in _stops(request.args[1]):
                text = text.partition(stop)[0]
            texts.append(text)
        return texts

    def _scored(
        self, pairs: Sequence[Any], with_greedy: bool
    ) -> list[likelihood.Likelihood]:
        return [
            one
            for i in range(0, len(pairs), _BATCH)
            for one in likelihood.of_pairs(
                self._subject, pairs[i : i + _BATCH], with_greedy
            )
        ]


def _stops(settings: dict[str, Any]) -> list[str]:
    """Returns the texts that end an answer."""
    until = settings.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]
