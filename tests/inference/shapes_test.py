"""Checks that samples do not depend on the shapes of the dispatches."""

from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import engine, parts, programs, scheduler
from glm5_jax.inference.requests import Request
from tests import environment
from tests.inference import engine_test
from tests.model import tiny


def make_requests():
    """Makes requests, one of which draws for longer than all others."""
    requests = engine_test.make_requests(5, 19, 2, 11, 33)
    return [*requests, engine.Request(7, [3, 9, 4], 30)]


class DecodeTest(parameterized.TestCase):
    def test_few_slots_are_decoded_without_the_others(self):
        params, sizes = tiny.params(engine_test.TINY), []

        def spy(params, config, state, chosen, **options):
            sizes.append(8 if chosen is None else len(chosen.slots))
            return decode(params, config, state, chosen, **options)

        decode, found, options = programs.decode, {}, {**engine_test.ENGINE}
        for num_slots in (8, 4):
            machine = engine.Engine(
                params, engine_test.TINY, **(options | {"num_slots": num_slots})
            )
            with mock.patch.object(programs, "decode", spy):
                found[num_slots] = engine_test.run_all(machine, make_requests())
            if num_slots == 8:
                self.assertEqual(sorted(set(sizes)), [1, 8])
                self.assertEqual(sizes[-1], 1)
        for id, wanted in found[4].items():
            self.assertEqual(found[8][id].tokens, wanted.tokens)
            np.testing.assert_allclose(
                found[8][id].logprobs,
                wanted.logprobs,
                atol=engine_test.LOGPROB_ATOL,
                rtol=0,
            )
            np.testing.assert_array_equal(
                np.sort(found[8][id].experts), np.sort(wanted.experts)
            )

    @parameterized.parameters((1, [1]), (4, [4]), (8, [1, 8]), (128, [2, 16, 128]))
    def test_numbers_of_slots_are_few(self, num_slots, wanted):
        self.assertEqual(parts.decode_counts(num_slots), wanted)


class PrefillTest(parameterized.TestCase):
    @parameterized.parameters((48, 1), (4 * 48, 4), (10**6, 9))
    def test_a_dispatch_reads_no_more_than_it_may(self, max_tokens, num_parts):
        """Reads 9 prompts of 40 tokens in rows of 48: 1, 4 or 16 rows a dispatch."""
        machine = scheduler.Scheduler(16, chunk=64)
        for i in range(9):
            machine.submit(Request(i, [1 + i] * 40, 1))
        shapes, read = parts.Shapes(16, 1, 64), []
        while len(read) < 9:
            todo = shapes.within(machine.plan(0), max_tokens)
            self.assertLen(todo.parts, min(num_parts, 9 - len(read)))
            rows, arrays = shapes.prefill(todo.parts, 0, 2)
            self.assertLessEqual(arrays.tokens.size, max_tokens)
            self.assertLen(rows, len(todo.parts))
            machine.advance(todo, [[5] for _ in todo.parts], 0)
            read += [part.work.request.id for part in todo.parts]
            for part in todo.parts:
                machine.release(part.work.request.id)
        self.assertEqual(read, [*range(9)])


if __name__ == "__main__":
    environment.main()
