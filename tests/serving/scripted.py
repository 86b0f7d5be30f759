"""A server of a tiny model whose greedy answers are known, in a thread of the test."""

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from typing import ClassVar

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.http_server import guard, listening
from glm5_jax.inference import commands, engine, service
from glm5_jax.inference import limits as limits_lib
from glm5_jax.model import transformer
from glm5_jax.serving import app, served
from glm5_jax.weights import generation_config, loading
from tests import (
    quick_servers,  # noqa: F401  they end at once
    small_configs,
)

TOKENIZER = tokenizer_lib.byte_tokenizer(tokenizer_lib.SPECIAL_TOKENS)
KEY = "secret"
NAME = "scripted"
CAPACITY = 768
LIMITS = limits_lib.Limits(with_adjustments=True)
DRAFTING = limits_lib.Limits(with_adjustments=True, num_drafts=3, adapts_drafts=False)
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
UNFORESEEN = "bSo"  # what follows these letters no draft knows


def params(model=MODEL):
    """Returns parameters with which the last token alone decides about the next.

    Multi-token prediction knows the script, but not what follows UNFORESEEN letters.
    """
    shapes = transformer.abstract_params(model)
    tree = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    tree["norm"] += 1
    embeddings = np.random.default_rng(0).normal(size=tree["embed_tokens"].shape)
    embeddings /= np.sqrt(np.mean(embeddings**2, axis=1, keepdims=True))
    tree["embed_tokens"] += embeddings.astype(np.float32)
    for text, logit in [*((line, _LOGIT) for line in SCRIPT), (SECOND, _LOGIT - LEAD)]:
        for before, after in itertools.pairwise(TOKENIZER.encode_spelt(text)):
            tree["lm_head"][:, after] += embeddings[before] * logit / MODEL.hidden_size
    if model.num_nextn_predict_layers:
        mtp, lost = tree["mtp"], embeddings[TOKENIZER.encode_spelt(UNFORESEEN)]
        mtp["enorm"] += 1
        mtp["norm"] += 1
        mirror = np.eye(MODEL.hidden_size) - 2 * np.linalg.pinv(lost) @ lost
        mtp["eh_proj"][: MODEL.hidden_size] += mirror
    return tree


@contextlib.contextmanager
def serving(max_seconds=60.0, sockets=None, fields=None, bounds=LIMITS, **limits):
    """Serves the model; yields the base URL, the model and the server.

    Args:
      max_seconds: of `Served`.
      sockets: arguments of `running`.
      fields: others of `Served`.
      bounds: of the engine.
      **limits: of the guard.
    """
    model = dataclasses.replace(
        MODEL, num_nextn_predict_layers=int(bounds.num_drafts > 0)
    )
    made = engine.Engine(
        params(model),
        model,
        num_slots=1,
        capacity=CAPACITY,
        chunk=16,
        limits=bounds,
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
            **{"is_seeded": True, **(fields or {})},
        )
        allowed = guard.Limits(**{"api_key": KEY, **limits})
        with running(model, allowed, **(sockets or {})) as (url, server):
            yield url, model, server


@contextlib.contextmanager
def serving_folder(folder, **limits):
    """Serves a Hugging Face folder in float32, with few programs; yields as below."""
    config, params, tokenizer = loading.load_model(
        folder, (("model.dtype", "float32"),)
    )
    made = engine.Engine(
        params, config, num_slots=1, capacity=CAPACITY, chunk=16, limits=LIMITS
    )
    with contextlib.closing(service.Service(made)) as driver:
        model = served.Served(
            name=NAME,
            service=driver,
            tokenizer=tokenizer,
            template=commands.template_of(tokenizer, loading.find(folder), None),
            stop_ids=commands.stop_ids(config, tokenizer),
            defaults=generation_config.sampling_settings(folder),
        )
        with running(model, guard.Limits(**{"api_key": KEY, **limits})) as found:
            yield found


@contextlib.contextmanager
def running(model, limits, send_buffer=None, **options):
    """Serves a model; yields the base URL and the server."""
    with contextlib.closing(listening.bind("127.0.0.1", 0)) as listener:
        if send_buffer is not None:  # bytes of a connection
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.listen()  # clients that come before the thread wait
        door = app.make(model, limits)
        server = listening.make_server(door, drain_seconds=10, **options)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.should_exit = True
            thread.join()


def wait_until(holds, seconds=60):
    """Waits for another thread or process."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class ServerTest(parameterized.TestCase):
    """Tests of one server, which runs for all of a class."""

    limits: ClassVar = {}
    served_fields: ClassVar = {}
    bounds = LIMITS

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        started = serving(fields=cls.served_fields, bounds=cls.bounds, **cls.limits)
        cls.url, cls.model, cls.server = cls.enterClassContext(started)
        cls.service = cls.model.service
