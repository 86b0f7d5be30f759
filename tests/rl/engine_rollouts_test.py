"""Episodes on a real engine: the learner gets the model's tokens and log-probs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax.environments import protocol
from glm5_jax.inference import engine as engine_lib
from glm5_jax.model import cached, transformer
from glm5_jax.rl import episodes as episodes_lib
from tests import environment
from tests.data import templates_test
from tests.inference import fewer_programs
from tests.model import tiny
from tests.rl import scripted

CAPACITY = 96
LOGPROB_ATOL = 1e-5  # float32 sums in another order
MODEL = tiny.model(
    vocab_size=templates_test.TOKENIZER.vocab_size,
    num_hidden_layers=2,
    first_k_dense_replace=0,  # one stack
    num_nextn_predict_layers=0,
    max_position_embeddings=CAPACITY,
)
SETTINGS = episodes_lib.Settings(
    max_new_tokens=12, max_turns=4, num_concurrent=3, continue_truncated=True
)


class Talk:
    """Answers every turn with a user's or a tool's message, without end."""

    name = "talk"

    def __init__(self, role):
        self.role = role

    def task(self, split, seed, index):
        messages = ({"role": "user", "content": f"{index}"},)
        return protocol.Task(str(index), messages)

    def environment(self):
        return self

    def demonstration(self, task):
        return None

    async def reset(self, task):
        return task.messages

    async def step(self, message):
        new = ({"role": self.role, "content": "go on"},)
        return protocol.StepResult(new, None, False, False)

    async def close(self):
        pass


@functools.cache
def params():
    return tiny.params(MODEL)


def collect(role, clear=True, num_concurrent=3, indices=range(5)):
    with fewer_programs.of_all_rows():
        engine = engine_lib.Engine(
            params(),
            MODEL,
            num_slots=3,
            capacity=CAPACITY,
            chunk=16,  # one program; prompts have several chunks
            num_steps=4,
            with_experts=True,
        )
    engine.publish(params(), 5)
    taskset, template = Talk(role), templates_test.template(clear=clear)
    todo = [
        episodes_lib.Job(taskset.task("train", 0, i), 0, 1000 + i * SETTINGS.max_turns)
        for i in indices
    ]
    settings = dataclasses.replace(SETTINGS, num_concurrent=num_concurrent)
    return scripted.collect(engine, taskset, template, todo, settings)


@jax.jit
def full_forward(params, tokens):
    """Returns the log-probs after each token of whole rows, and its experts."""
    out = transformer.forward(params, MODEL, tokens)
    logits = transformer.logits(params, MODEL, out.hidden)
    experts = cached.chosen_experts(MODEL, out.aux, tokens.shape)
    return jax.nn.log_softmax(logits), experts


class EngineRolloutsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("appended", "tool", True, 0), ("forked", "user", True, 3)
    )
    def test_the_learner_s_forward_pass_agrees(self, role, clear, num_forks):
        for episode in collect(role, clear):
            self.assertEqual(episode.num_forks, num_forks)
            self.assertEqual(episode.num_turns, SETTINGS.max_turns)
            for sample in episode.samples:
                size = len(sample.tokens)
                tokens = np.zeros((1, CAPACITY), np.int32)
                tokens[0, :size] = sample.tokens
                logprobs, experts = full_forward(params(), tokens)
                at = np.flatnonzero(sample.mask)
                np.testing.assert_allclose(
                    np.array(sample.logprobs)[at],
                    np.asarray(logprobs)[0, at - 1, np.array(sample.tokens)[at]],
                    atol=LOGPROB_ATOL,
                    rtol=0,
                )
                self.assertEqual({sample.versions[i] for i in at}, {5})
                experts = np.asarray(experts)[:, 0, : size - 1].swapaxes(0, 1)
                np.testing.assert_array_equal(sample.experts, experts)

    @pytest.mark.slow
    def test_an_episode_does_not_depend_on_others(self):
        together = collect("tool")
        for num_concurrent, indices in ((1, range(5)), (2, [3])):
            alone = collect("tool", True, num_concurrent, indices)
            for episode in alone:
                other = together[int(episode.task.id)]
                self.assertEqual(episode.transcript, other.transcript)
                for ours, theirs in zip(episode.samples, other.samples, strict=True):
                    self.assertEqual(ours.tokens, theirs.tokens)
                    np.testing.assert_allclose(
                        ours.logprobs, theirs.logprobs, atol=LOGPROB_ATOL, rtol=0
                    )


if __name__ == "__main__":
    environment.main()
