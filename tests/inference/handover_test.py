"""Pages that another engine has read give what the engine's own give."""

import dataclasses
import functools
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine, handover, host_pages, pages
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from tests import environment
from tests.inference import engine_test
from tests.model import tiny

CONFIG = engine_test.ONE_LAYER
SIZE = 8
LIMITS = Limits(num_pages=8, page_size=SIZE, host_pages=16)
(PROMPT,) = engine_test.make_prompts(45)
WHOLE = PROMPT[:40]  # its pages


@functools.cache
def params(config=CONFIG, seed=0):
    return tiny.params(config, seed)


def make(config=CONFIG, limits=LIMITS, seed=0, **options):
    options = engine_test.ENGINE | options
    return engine.Engine(params(config, seed), config, **options, limits=limits)


def read(machine, prompt=WHOLE, id=9):
    """Lets an engine read a prompt."""
    engine_test.run_all(machine, [Request(id, prompt, 1)])


def answer(machine, prompt=PROMPT, id=0):
    """Returns the greedy completion of a prompt."""
    request = Request(id, prompt, 9, temperature=0.0)
    (found,) = engine_test.run_all(machine, [request]).values()
    return found


def hand_over(source, target, first=0, tokens=WHOLE):
    found = handover.copy(source.view(), tokens, first)
    return handover.take(target.view(), tokens, found)


class HandoverTest(parameterized.TestCase):
    def check(self, found, want):
        """Compares completions bit for bit."""
        self.assertEqual(found.num_cached, want.num_cached)
        self.assertEqual(found.tokens, want.tokens)
        self.assertEqual(found.logprobs, want.logprobs)
        np.testing.assert_array_equal(found.experts, want.experts)

    @parameterized.named_parameters(
        ("latents", {}, 0),
        ("fp8_and_drafts", {"kv_cache_dtype": "fp8", "num_nextn_predict_layers": 1}, 2),
    )
    def test_answers_are_those_of_own_pages(self, changes, num_drafts):
        self.check_answers(changes, num_drafts)

    @pytest.mark.slow
    def test_answers_with_a_cache_in_int8(self):
        self.check_answers({"kv_cache_dtype": "int8"}, 0)

    def check_answers(self, changes, num_drafts):
        config = dataclasses.replace(CONFIG, **changes)
        limits = dataclasses.replace(LIMITS, num_drafts=num_drafts, adapts_drafts=False)
        source, target = make(config, limits), make(config, limits)
        read(source)
        self.assertEqual(hand_over(source, target), 5)
        self.assertEqual(target.num_known(PROMPT), 40)
        found = answer(target)
        self.assertEqual((found.num_cached, target.num_restored), (40, 5))
        self.check(found, answer(source))
        self.assertEqual(target.drafter.acceptance.rounds > 0, num_drafts > 0)
        whole = answer(make(config, limits))  # reads all of the prompt itself
        self.assertEqual(found.tokens, whole.tokens)
        np.testing.assert_allclose(
            found.logprobs, whole.logprobs, atol=engine_test.LOGPROB_ATOL, rtol=0
        )

    def test_a_part_that_is_known_is_not_copied(self):
        source, target = make(), make()
        read(source)
        read(target, WHOLE[:16])
        self.assertEqual(hand_over(source, target, first=3), 0)  # a page is missing
        found = handover.copy(source.view(), WHOLE, 2)
        self.assertEqual(found.number, 3)
        self.assertEqual(found.first, 2)
        self.assertEqual(handover.take(target.view(), WHOLE, found), 3)
        self.assertEqual(handover.take(target.view(), WHOLE, found), 0)
        self.check(answer(target), answer(source))
        self.assertEqual(target.num_restored, 3)

    def test_pages_of_host_memory_are_handed_over_too(self):
        source, target = make(), make()
        read(source)
        (other,) = engine_test.make_prompts(52)
        read(source, [token % 95 + 1 for token in other])  # takes seven of the pages
        self.assertEqual(hand_over(source, target), 5)
        self.check(answer(target), answer(source))

    def test_only_as_many_as_there_is_room_for(self):
        source = make()
        read(source)
        target = make(limits=dataclasses.replace(LIMITS, host_pages=2))
        self.assertEqual(hand_over(source, target), 2)
        found = answer(target)
        self.assertEqual(found.num_cached, 16)
        self.assertEqual(found.tokens, answer(source).tokens)
        target = make(limits=dataclasses.replace(LIMITS, host_pages=0))
        self.assertEqual(hand_over(source, target), 0)

    def test_other_weights_are_refused(self):
        source, target = make(), make()
        read(source)
        target.publish(params(), 1)
        with self.assertRaisesRegex(handover.MismatchError, "version 0 of the weights"):
            hand_over(source, target)
        source.publish(params(seed=1), 1)
        old = handover.copy(source.view(), WHOLE, 0)
        self.assertEqual((old.number, old.version), (0, 1))
        read(source)
        with self.assertRaisesRegex(handover.MismatchError, "another model"):
            hand_over(source, target)
        source.publish(params(), 2)
        target.publish(params(), 2)
        read(source)
        self.assertEqual(hand_over(source, target), 5)
        for options in (
            {"with_experts": False},
            {"limits": dataclasses.replace(LIMITS, num_pages=16, page_size=4)},
        ):
            other = make(**options)
            other.publish(params(), 2)
            with self.assertRaisesRegex(handover.MismatchError, "another model"):
                hand_over(source, other)

    def test_the_form_is_that_of_a_page(self):
        source = make()
        read(source)
        form = source.view().form
        found = handover.copy(source.view(), WHOLE, 4)
        self.assertEqual(found.arrays.keys(), form.arrays.keys())
        for name, array in found.arrays.items():
            self.assertEqual(form.arrays[name].shape, array.shape, name)
            self.assertEqual(array.shape[1], 1, name)  # the fifth page alone
            self.assertEqual(form.arrays[name].dtype, array.dtype, name)
        size = sum(array.nbytes for array in found.arrays.values())
        self.assertEqual(form.page_bytes, size)

    def test_without_memory_nothing_is_taken(self):
        source, target = make(), make()
        read(source)
        found = handover.copy(source.view(), WHOLE, 0)
        with (
            mock.patch.object(host_pages.np, "empty", side_effect=MemoryError),
            self.assertRaises(MemoryError),
        ):
            handover.take(target.view(), WHOLE, found)
        self.assertEqual(target.num_known(PROMPT), 0)

    def test_a_dispatch_that_ctrl_c_interrupted_counts(self):
        """Its pages are handed over, although its tokens were not put down yet."""
        source = make()
        source.submit(Request(9, WHOLE[:16], 2))
        late = None, KeyboardInterrupt  # the second call is after the dispatch
        with (
            mock.patch.object(source, "_settle", side_effect=late),
            self.assertRaises(KeyboardInterrupt),
        ):
            source.step()
        self.assertEqual(handover.copy(source.view(), WHOLE, 0).number, 2)

    def test_a_lost_cache_has_no_pages(self):
        source, target = make(), make()
        read(source)
        source.clear_cache()
        self.assertEqual(handover.copy(source.view(), WHOLE, 0).number, 0)
        read(source)
        target.clear_cache()
        self.assertEqual(hand_over(source, target), 5)
        self.check(answer(target), answer(source))

    def test_slots_have_no_pages(self):
        machine = make(limits=Limits())
        self.assertEqual(machine.num_known(PROMPT), 0)
        with self.assertRaisesRegex(config_lib.InputError, "num_pages must be above 0"):
            machine.view()


class PoolTest(absltest.TestCase):
    def test_pages_in_use_stay_and_the_oldest_make_room(self):
        pool = pages.Pool(1, 1, num_hosted=3)
        self.assertEqual(pool.adopt([7], 1), (0, []))  # its parent is missing
        _, (a, b) = pool.adopt([1, 2], 0)
        known, (c,) = pool.adopt([1, 3], 1)
        self.assertEqual((known, c.parent), (1, a))
        self.assertEqual({a.host, b.host, c.host}, {0, 1, 2})
        known, (d,) = pool.adopt([1, 3, 4], 2)  # takes the place of b
        self.assertEqual((known, d.parent), (2, c))
        self.assertEqual(pool.match([1, 2]), [a])
        self.assertEqual(pool.adopt([1, 3, 4, 5], 3), (3, []))  # all are in use
        pool.adopt([6], 0)
        self.assertEqual(pool.match([1, 3, 4]), [a, c])  # leaves go first
        self.assertLen(pool.match([6]), 1)


if __name__ == "__main__":
    environment.main()
