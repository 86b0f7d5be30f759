"""Checks that the bfloat16 engine draws from the log-probs that training computes."""

import dataclasses
import functools

import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax.inference import engine, scoring
from glm5_jax.model import cached, invariance, transformer
from tests import environment
from tests.inference import engine_test
from tests.model import tiny

MODEL = dataclasses.replace(
    engine_test.TINY, dtype="bfloat16", batch_invariant=True, index_topk=8
)
LAST_DIGIT = 2e-6  # of a log-prob: two programs subtract the same float32 logits
NUM_TOKENS = 20


@functools.cache
def params():
    return tiny.params(MODEL)


def whole_rows(config, rows):
    """Returns -log p of the next tokens, and the experts, of rows read at once."""

    def experts(params, config, tokens):
        out = transformer.forward(params, config, tokens)
        return cached.chosen_experts(config, out.aux, tokens.shape)

    compiled = invariance.jit(experts, static_argnames="config")
    scored = scoring.score(params(), config, scoring.rows_of_tokens(rows, config))
    return scored, np.asarray(compiled(params(), config, rows))


class ParityTest(parameterized.TestCase):
    def test_scoring_finds_the_drawn_tokens(self):
        self.check(num_slots=4, chunk=24)

    @pytest.mark.slow  # 10 s
    def test_of_a_single_slot(self):
        self.check(num_slots=1, chunk=16)

    @pytest.mark.slow  # 15 s
    def test_of_few_slots_among_many(self):
        self.check(num_slots=64, chunk=24)

    def check(self, **options):
        requests = engine_test.make_requests(5, 19, 2, 33, 7, 28, n=NUM_TOKENS)
        options |= {"capacity": 64, "num_steps": 5, "with_experts": True}
        machine = engine.Engine(params(), MODEL, **options)
        done = engine_test.run_all(machine, requests)
        rows = np.zeros((len(requests), 64), np.int32)
        for r in requests:
            ids = [*r.prompt, *done[r.id].tokens]
            rows[r.id, : len(ids)] = ids
        scored, experts = whole_rows(MODEL, rows)
        for r in requests:
            first, last = len(r.prompt) - 1, len(r.prompt) + NUM_TOKENS - 1
            gap = np.abs(scored[r.id, first:last] + done[r.id].logprobs)
            self.assertLess(gap.max(), LAST_DIGIT, r.id)
            replayed = experts[:, r.id, :last].swapaxes(0, 1)
            np.testing.assert_array_equal(
                np.sort(done[r.id].experts), np.sort(replayed)
            )


if __name__ == "__main__":
    environment.main()
