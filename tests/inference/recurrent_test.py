"""The engine with gated delta nets: states instead of rows of tokens.

The state of a slot must be that of its own sequence: padding, idle slots, chunks of a
prompt and earlier requests leave no trace in it.
"""

import numpy as np
from absl.testing import absltest

from glm5_jax.inference import engine, scheduler
from tests import environment
from tests.inference import engine_test
from tests.model import tiny

MODEL = tiny.model(
    vocab_size=96,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    num_nextn_predict_layers=0,
    max_position_embeddings=128,
    layer_types=("gated_delta", "simple_gated_delta"),
)
OPTIONS = {"num_slots": 2, "capacity": 64, "chunk": 16, "num_steps": 5}
ATOL = 1e-5  # of log-probs: float32 sums in another order


class RecurrentTest(absltest.TestCase):
    def test_tokens_and_logprobs_are_those_of_whole_rows(self):
        """More requests than slots, prompts longer than a chunk, and a next turn."""
        params = tiny.params(MODEL)
        machine = engine.Engine(params, MODEL, **OPTIONS)
        requests = engine_test.make_requests(5, 21, 2, 37, 11, temperature=0.0)
        done = engine_test.run_all(machine, requests)
        turn = [*requests[-1].prompt, *done[4].tokens, 7, 8, 9]
        requests.append(engine.Request(id=5, prompt=turn, max_new_tokens=6))
        done |= engine_test.run_all(machine, requests[-1:])
        rows = np.zeros((len(requests), 64), np.int32)
        for row, r in zip(rows, requests, strict=True):
            ids = [*r.prompt, *done[r.id].tokens]
            row[: len(ids)] = ids
        logits = np.asarray(engine_test.full_logits(params, MODEL, rows))
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        for r in requests:
            tokens = done[r.id].tokens
            first = len(r.prompt) - 1
            want = logprobs[r.id, first : first + len(tokens)]
            self.assertLen(tokens, r.max_new_tokens)
            chosen = want[np.arange(len(tokens)), tokens]
            np.testing.assert_allclose(
                done[r.id].logprobs, chosen, rtol=0, atol=ATOL, err_msg=str(r.id)
            )
            if r.temperature == 0:
                np.testing.assert_array_equal(tokens, want.argmax(-1))

    def test_a_slot_is_continued_at_its_end_only(self):
        """A state has no earlier version: a prompt extends all tokens, or none."""
        text = [*range(1, 11)]
        for prompt, want in (([*text, 11, 12], 10), ([*text[:9], 11, 12], 0)):
            machine = scheduler.Scheduler(1, 64, prefill_tokens=64, can_set_back=False)
            for id, ids in enumerate((text[:9], prompt)):
                machine.submit(engine.Request(id=id, prompt=ids, max_new_tokens=2))
                first = machine.plan(0)
                machine.advance(first, [[10]], 0)
                if id == 0:
                    machine.advance(machine.plan(0), [[50]], 0)
                    machine.release(0)
            self.assertEqual(first.parts[0].start, want)


if __name__ == "__main__":
    environment.main()
