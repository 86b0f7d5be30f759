"""Models that tests of evaluations ask, and an answer that knows the right ones."""

from unittest import mock

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import record
from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import requests
from tests.model import tiny

BYTES = tokenizer_lib.byte_tokenizer()


def subject(**changes):
    """A model of bytes with random parameters."""
    config = tiny.model(vocab_size=260, eos_token_id=(256,), **changes)
    return record.Subject(config=config, params=tiny.params(config), tokenizer=BYTES)


def knowing(tasks, answers):
    """Patches the engine with one whose completions are these texts, by prompt."""
    known = {tuple(t.prompt): a for t, a in zip(tasks, answers, strict=True)}

    class Knowing:
        """Answers each request with the text that belongs to its prompt."""

        def __init__(self, *_, **__):
            self._queue = []

        def submit(self, request):
            self._queue.append(request)

        @property
        def num_pending(self):
            return len(self._queue)

        def step(self):
            request = self._queue.pop()
            ids = BYTES.encode(known[tuple(request.prompt)])
            done = requests.Completion(ids[: request.max_new_tokens], [], "length")
            return [(request.id, done)]

    return mock.patch.object(engine_lib, "Engine", Knowing)
