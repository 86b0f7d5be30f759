"""Checks what the result of a dispatch writes into completions."""

import dataclasses

import numpy as np
from absl.testing import absltest

from glm5_jax.inference import adjustments, pages, results, scheduler, steps
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

    def test_experts_of_all_tokens_but_the_last(self):
        """They are the tokens themselves; parts are read again, in other sizes."""
        machine = scheduler.Scheduler(1, 16, prefill_tokens=16)
        work = machine.submit(Request(0, [1, 2, 3, 4, 5], 5))
        slot, pieces = machine.plan(0).parts[0].slot, []
        for start, tokens, num_drawn, new in (
            (0, [1, 2, 3], 0, []),
            (3, [4, 5], 0, [6]),
            (5, [6], 1, [7, 8]),
            (0, [1, 2], 3, []),  # the cache was lost
            (2, [3, 4, 5, 6, 7, 8], 3, [9]),
            (5, [6, 7, 8], 3, [9]),  # from within an earlier part
            (8, [9], 4, [10]),
        ):
            part = scheduler.Part(slot, work, start, tokens, bool(new), num_drawn)
            read = [*tokens, *new[:-1], 0, 0]  # and padding
            experts = np.reshape(np.asarray(read, np.int32), (1, 1, -1, 1))
            found = result([[*new, -1]])
            drawn = found.drawn._replace(experts=experts)
            found = dataclasses.replace(found, drawn=drawn)
            results.write(found, part, 0, new, pieces)
        self.assertEqual(work.completion.tokens, [6, 7, 8, 9, 10])
        self.assertEqual(work.completion.finish_reason, "length")
        self.assertEqual(work.completion.experts[:, 0, 0].tolist(), [*range(1, 10)])

    def test_pages_keep_the_experts_of_their_tokens(self):
        rows = np.arange(7).reshape(7, 1, 1)
        nodes = [pages.Node(i, key=(1, 2)) for i in range(3)]
        kept = nodes[1].experts = np.zeros((2, 1, 1))
        results.share(nodes, [(0, rows[:3]), (3, rows[3:])])
        self.assertIs(nodes[1].experts, kept)
        for i in (0, 2):
            self.assertEqual(nodes[i].experts.ravel().tolist(), [2 * i, 2 * i + 1])

    def test_as_many_alternatives_as_were_asked_for(self):
        machine = scheduler.Scheduler(1, 16, prefill_tokens=16)
        work = machine.submit(Request(0, [1], 3, num_alternatives=2))
        (part,) = machine.plan(0).parts
        raw = np.asarray([[-1.0, -2.0, 0.0]], np.float32)
        ids = np.arange(9, dtype=np.int32).reshape(1, 3, 3)
        details = adjustments.Details(raw, ids, -ids.astype(np.float32))
        found = result([[5, 6, -1]])
        drawn = found.drawn._replace(details=details)
        found = dataclasses.replace(found, drawn=drawn)
        results.write(found, part, 0, [5, 6], [])
        self.assertEqual(work.completion.raw_logprobs, [-1.0, -2.0])
        wanted = [[(0, 0.0), (1, -1.0)], [(3, -3.0), (4, -4.0)]]
        self.assertEqual(work.completion.alternatives, wanted)


if __name__ == "__main__":
    environment.main()
