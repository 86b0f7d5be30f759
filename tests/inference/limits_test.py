"""Checks the bounds of an engine's sizes, and whose models have drafts and pages."""

import dataclasses

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import engine
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from tests import environment
from tests.inference import recurrent_test
from tests.model import tiny

CONFIG = tiny.model(num_nextn_predict_layers=1)
RECURRENT = dataclasses.replace(recurrent_test.MODEL, num_nextn_predict_layers=1)


class LimitsTest(parameterized.TestCase):
    def refused(self, message):
        return self.assertRaisesRegex(config_lib.InputError, message)

    @parameterized.parameters(
        ("max_stop_ids", 0, "must not be negative"),
        ("num_pages", 0, "must not be negative"),
        ("host_pages", 0, "must not be negative"),
        ("num_drafts", 0, "must not be negative"),
        ("prefill_tokens", 1, "must be at least 1"),
        ("page_size", 1, "must be at least 1"),
    )
    def test_least_sizes(self, name, least, message):
        Limits(**{name: least})
        with self.refused(f"{name} {message}"):
            Limits(**{name: least - 1})

    def test_drafts_are_at_most_seven(self):
        Limits(num_drafts=7)
        with self.refused("num_drafts must be at most 7, got 8"):
            Limits(num_drafts=8)

    def test_acceptance_has_two_forms(self):
        limits = Limits(acceptance="rejection", num_drafts=1)
        self.assertNotEqual(limits, Limits(acceptance="same_noise", num_drafts=1))
        with self.refused("acceptance must be same_noise or rejection, got 'none'"):
            object.__setattr__(limits, "acceptance", "none")
            limits.__post_init__()

    def test_eight_stop_ids_unless_more_are_asked_for(self):
        def errors(limits, number):
            return limits.errors(Request(0, [1], 1, frozenset(range(number))))

        self.assertEqual(errors(Limits(), 8), [])
        (message,) = errors(Limits(), 9)
        self.assertIn("at most 8 ids (the engine's max_stop_ids), got 9", message)
        self.assertEqual(errors(Limits(max_stop_ids=9), 9), [])
        self.assertEqual(errors(Limits.of_prompts(9, 0), 9), [])
        self.assertEqual(errors(Limits.of_prompts(1, 0), 8), [])
        self.assertLen(errors(Limits.of_prompts(9, 0), 10), 1)

    def test_wishes_need_adjustments(self):
        request = Request(0, [1], 1, logit_bias={3: 1.0})
        self.assertEqual(Limits(with_adjustments=True).errors(request), [])
        self.assertLen(Limits().errors(request), 1)
        self.assertEqual(Limits().errors(Request(0, [1], 1)), [])

    def test_eight_whole_parts_are_read_between_two_draws(self):
        self.assertEqual(Limits().prefill_tokens, 8 * engine.CHUNK)

    def test_numbers_of_drafts(self):
        for limits, wanted in (
            (Limits(num_drafts=3), [0, 1, 3]),
            (Limits(num_drafts=3, adapts_drafts=False), [3]),
            (Limits.of_prompts(1, 3), [3]),
        ):
            self.assertEqual(limits.drafter(CONFIG).numbers, wanted)

    def test_models_that_draft(self):
        none, two = (
            dataclasses.replace(CONFIG, num_nextn_predict_layers=n) for n in (0, 2)
        )
        for config in (CONFIG, none, two, RECURRENT):
            self.assertFalse(Limits().drafter(config).is_on)
        self.assertTrue(Limits(num_drafts=1).drafter(CONFIG).is_on)
        for config, message in (
            (none, "num_nextn_predict_layers=0.*got 1"),
            (two, "num_nextn_predict_layers=2.*got 1"),
            (RECURRENT, "recurrent layers, whose states cannot be set back; got 1"),
        ):
            with self.refused(message):
                Limits(num_drafts=1).drafter(config)

    def test_pages_of_a_sequence_and_of_a_device(self):
        limits = Limits(num_pages=8)  # of 64 tokens
        for capacity, devices, wanted in (
            (256, 1, (4, 8)),
            (257, 1, (5, 8)),
            (512, 1, (8, 8)),
            (256, 2, (4, 4)),
        ):
            self.assertEqual(limits.table(CONFIG, capacity, devices), wanted)
        self.assertIsNone(Limits().table(CONFIG, 512, 1))
        one = Limits(num_pages=1, page_size=8, host_pages=1)
        self.assertEqual(one.table(CONFIG, 8, 1), (1, 1))

    @parameterized.named_parameters(
        ("few", {}, CONFIG, 513, 1, "at least the 9 pages .* of 513 tokens, got 8"),
        ("share", {}, CONFIG, 257, 2, "at least the 5 pages .* 257 tokens, got 4"),
        ("uneven", {}, CONFIG, 64, 3, "divisible by the 3 devices .* got 8"),
        ("recurrent", {}, RECURRENT, 64, 1, "recurrent layers, .*no pages; got 8"),
        ("hosted", {"host_pages": 1}, CONFIG, 64, 2, "several devices .* 1 on 2"),
        ("none", {"host_pages": 1, "num_pages": 0}, CONFIG, 64, 1, "needs num_pages"),
    )
    def test_pages_that_cannot_be(self, changes, config, capacity, devices, message):
        limits = Limits(**({"num_pages": 8} | changes))
        with self.refused(message):
            limits.table(config, capacity, devices)


if __name__ == "__main__":
    environment.main()
