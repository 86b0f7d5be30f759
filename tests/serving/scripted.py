"""A server of a tiny model whose greedy answers are known, in a thread of the test."""

import contextlib
import dataclasses
import itertools
import threading
from typing import ClassVar

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import engine, service
from glm5_jax.inference import limits as limits_lib
from glm5_jax.model import transformer
from glm5_jax.serving import command, guard, served
from tests import small_configs

TOKENIZER = tokenizer_lib.byte_tokenizer(tokenizer_lib.SPECIAL_TOKENS)
KEY = "secret"
NAME = "scripted"
CAPACITY = 768
MODEL = dataclasses.replace(
    small_configs.DENSE_MODEL,
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=64,
    max_position_embeddings=CAPACITY,
)
# The likeliest successor of each token of a line is the next one.
SCRIPT = (
    "<think>So</think>Hé!<|user|>",
    "<tool_call>f<arg_key>k</arg_key><arg_value>5</arg_value></tool_call>"
    "<|observation|>",
    "abcd<|endoftext|>",
    "xyx",  # without end
)
# After "o" the logit of a tool call is LEAD below that of </think>.
SECOND = "o<tool_call>"
_LOGIT, LEAD = 24.0, 0.5


def params():
    """Returns parameters with which the last token alone decides about the next."""
    shapes = transformer.abstract_params(MODEL)
    tree = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    tree["norm"] += 1
    embeddings = np.random.default_rng(0).normal(size=tree["embed_tokens"].shape)
    embeddings /= np.sqrt(np.mean(embeddings**2, axis=1, keepdims=True))
    tree["embed_tokens"] += embeddings.astype(np.float32)
    for text, logit in [*((line, _LOGIT) for line in SCRIPT), (SECOND, _LOGIT - LEAD)]:
        for before, after in itertools.pairwise(TOKENIZER.encode_spelt(text)):
            tree["lm_head"][:, after] += embeddings[before] * logit / MODEL.hidden_size
    return tree


@contextlib.contextmanager
def serving(max_seconds=60.0, **limits):
    """Serves the model; yields the base URL, the model and the server."""
    made = engine.Engine(
        params(),
        MODEL,
        num_slots=1,
        capacity=CAPACITY,
        chunk=16,
        limits=limits_lib.Limits(with_adjustments=True),
    )
    with contextlib.closing(service.Service(made)) as driver:
        model = served.Served(
            name=NAME,
            service=driver,
            tokenizer=TOKENIZER,
            template=templates.Template(TOKENIZER),
            stop_ids=frozenset([TOKENIZER.eos_id]),
            defaults={"temperature": 0.0},
            max_seconds=max_seconds,
        )
        with contextlib.closing(command.bind("127.0.0.1", 0)) as listener:
            server = command.make_server(
                model, guard.Limits(**{"api_key": KEY, **limits}), drain_seconds=10
            )
            thread = threading.Thread(
                target=server.run, kwargs={"sockets": [listener]}, daemon=True
            )
            thread.start()
            port = listener.getsockname()[1]
            try:
                yield f"http://127.0.0.1:{port}", model, server
            finally:
                server.should_exit = True
                thread.join()


class ServerTest(parameterized.TestCase):
    """Tests of one server, which runs for all of a class."""

    limits: ClassVar = {}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        started = serving(**cls.limits)
        cls.url, cls.model, cls.server = cls.enterClassContext(started)
        cls.service = cls.model.service
