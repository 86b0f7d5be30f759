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
    requests = engine_test.make_requests(5, 14, 2, 11, 16)
    return [*requests, engine.Request(7, [3, 9, 4], 30)]


class DecodeTest(parameterized.TestCase):
    def test_few_slots_are_decoded_without_the_others(self):
        params, sizes = tiny.params(engine_test.ONE_LAYER), []

        def spy(params, config, state, chosen, **options):
            sizes.append(8 if chosen is None else len(chosen.slots))
            state, drawn = decode(params, config, state, chosen, **options)
            self.assertGreaterEqual(drawn.ids.min(), -1)  # which is no token
            return state, drawn

        def read(*args, **options):
            state, drawn = prefill(*args, **options)
            self.assertGreaterEqual(drawn.ids.min(), -1)
            return state, drawn

        decode, found, options = programs.decode, {}, {**engine_test.ENGINE}
        prefill = programs.prefill
        for num_slots in (8, 4):
            machine = engine.Engine(
                params, engine_test.ONE_LAYER, **(options | {"num_slots": num_slots})
            )
            with (
                mock.patch.object(programs, "decode", spy),
                mock.patch.object(programs, "prefill", read),
            ):
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

    @parameterized.parameters(
        (1, [1]),
        (4, [4]),
        (8, [1, 8]),
        (16, [1, 4, 16]),
        (64, [1, 4, 16, 64]),
        (128, [1, 8, 32, 128]),
    )
    def test_numbers_of_slots_are_few_and_one_is_among_them(self, num_slots, wanted):
        self.assertEqual(parts.decode_counts(num_slots), wanted)

    def test_a_slot_more_or_less(self):
        self.assertEqual(parts.decode_counts(7), [7])
        self.assertEqual(parts.decode_counts(9), [1, 2, 9])


class PrefillTest(parameterized.TestCase):
    @parameterized.parameters(
        (1, [1]), (2, [1, 2]), (6, [1, 2, 6]), (64, [1, 4, 16, 64])
    )
    def test_rows_grow_about_fourfold(self, num_slots, wanted):
        self.assertEqual(parts.row_counts(num_slots), wanted)

    @parameterized.parameters((48, 1), (4 * 48, 4), (10**6, 9))
    def test_a_dispatch_reads_no_more_than_it_may(self, max_tokens, num_parts):
        """Reads 9 prompts of 40 tokens in rows of 48: 1, 4 or 16 rows a dispatch."""
        machine = scheduler.Scheduler(16, chunk=64, prefill_tokens=10**6)
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


class DevicesTest(parameterized.TestCase):
    """Two devices with 16 slots each, and five requests."""

    def setUp(self):
        super().setUp()
        self.machine = scheduler.Scheduler(32, 64, 2, prefill_tokens=10**6)
        self.shapes = parts.Shapes(32, 2, 64)
        for i, length in enumerate((3, 20, 7, 1, 30)):
            prompt = [10 * i + n for n in range(length)]
            request = Request(i, prompt, 9, frozenset({50 + i}), 0.5, 0.25, i, 0.125)
            self.machine.submit(request)

    def test_every_part_has_a_row_on_its_slots_device(self):
        todo = self.shapes.within(self.machine.plan(0), 10**6)
        rows, arrays = self.shapes.prefill(todo.parts, 3, 2)
        self.assertEqual(arrays.tokens.shape, (2 * 4, 32))
        self.assertEqual(todo.num_tokens, 4 * 32)  # of a device
        self.assertEqual(sorted(rows), [0, 1, 2, 4, 5])  # the first ones of a device
        for row, part in zip(rows, todo.parts, strict=True):
            slot, length = part.slot, len(part.tokens)
            self.assertEqual(row // 4, slot.device)
            np.testing.assert_array_equal(arrays.tokens[row, :length], part.tokens)
            np.testing.assert_array_equal(arrays.tokens[row, length:], 0)
            place = (arrays.num_tokens[row], arrays.slots[row], arrays.start[row])
            self.assertEqual(place, (length, slot.index - 16 * slot.device, 0))
            request, plan = part.work.request, arrays.plan
            self.assertEqual(plan.budget[row], 9)
            self.assertEqual(plan.stop_ids[row].tolist(), [50 + request.id, -1])
            settings = plan.sampling
            found = [x[row] for x in (settings.temperature, settings.top_p)]
            found += [settings.top_k[row], settings.min_p[row]]
            self.assertEqual(found, [0.5, 0.25, request.id, 0.125])
        self.assertEqual({part.slot.device for part in todo.parts}, {0, 1})
        others = [row for row in range(8) if row not in rows]
        np.testing.assert_array_equal(arrays.slots[np.array(others)], 16)  # of none

    def test_few_slots_of_each_device_are_decoded(self):
        todo = self.machine.plan(0)
        self.machine.advance(todo, [[5] for _ in todo.parts], 0)
        for i in (1, 2):
            self.machine.release(i)
        todo = self.machine.plan(0)
        rows, chosen = self.shapes.decode(todo.parts)
        self.assertEqual((todo.kind, len(rows), len(chosen.slots)), ("decode", 3, 8))
        want = np.full(8, 16)
        for row, part in zip(rows, todo.parts, strict=True):
            self.assertEqual(row // 4, part.slot.device)
            want[row] = part.slot.index - 16 * part.slot.device
        np.testing.assert_array_equal(chosen.slots, want)

    def test_padding_is_a_dispatch_without_parts(self):
        arrays = self.shapes.padding((4, 24), 2)
        self.assertEqual(arrays.tokens.shape, (8, 24))
        np.testing.assert_array_equal(arrays.slots, [16] * 8)
        np.testing.assert_array_equal(arrays.tokens, np.zeros((8, 24)))
        for nothing in (arrays.num_tokens, arrays.start, arrays.plan.budget):
            np.testing.assert_array_equal(nothing, [0] * 8)
        np.testing.assert_array_equal(arrays.is_last, [False] * 8)

    def test_shapes_are_those_that_a_dispatch_may_have(self):
        got = self.shapes.prefill_shapes(96)  # just 4 rows of 24
        sizes = (16, 24, 32, 48, 64)
        rows = {16: (1, 4), 24: (1, 4)}
        want = [(n, size) for size in sizes for n in rows.get(size, (1,))]
        self.assertEqual(got, want)


if __name__ == "__main__":
    environment.main()
