"""Checks what the result of a dispatch writes into completions."""

import numpy as np
from absl.testing import absltest

from glm5_jax.inference import results, scheduler, steps
from glm5_jax.inference.requests import Request
from tests import environment
from tests.inference import fake_devices


def result(ids, version=0):
    """Returns the result of a dispatch without parts."""
    ids = np.asarray(ids, np.int32)
    dispatch = scheduler.Dispatch("decode", [])
    drawn = steps.Drawn(ids, np.zeros(ids.shape, np.float32), None)
    rows = [*range(len(ids))]
    state = fake_devices.small_state(1)
    return results.Result(dispatch, rows, state, drawn, version)


class ResultTest(absltest.TestCase):
    def test_every_id_of_the_vocabulary_counts(self):
        found = result([[0, 5, -1], [-1, -1, -1], [7, 0, 0]])
        self.assertEqual(found.ids, [[0, 5], [], [7, 0, 0]])

    def test_tokens_end_by_a_stop_id_or_their_number(self):
        for tokens, wanted in (
            ([5, 6], None),
            ([5, 6, 7], "length"),
            ([9], "stop"),
            ([5, 6, 9], "stop"),
            ([9, 5], None),
            ([], None),
        ):
            machine = scheduler.Scheduler(1, 16, prefill_tokens=16)
            work = machine.submit(Request(0, [1], 3, frozenset([9])))
            (part,) = machine.plan(0).parts
            found = result([[*tokens, -1]], 4)
            is_over = results.write(found, part, 0, tokens, [])
            self.assertEqual(work.completion.finish_reason, wanted)
            self.assertEqual(is_over, wanted is not None)
            self.assertEqual(work.completion.versions, [4] * len(tokens))


if __name__ == "__main__":
    environment.main()
