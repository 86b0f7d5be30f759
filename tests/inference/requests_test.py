"""Checks the bounds of each field of a request, from both sides."""

import dataclasses
import types

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import requests
from tests import environment
from tests.model import tiny

CONFIG = tiny.model(vocab_size=400)
LARGEST = 2**31 - 1
HOTTEST = float(np.finfo(np.float32).max)
TINIEST = 1e-30


def changed(name, value):
    """Returns a request with a field, whatever its type."""
    request = requests.Request(0, [1], 1)
    object.__setattr__(request, name, value)  # bypasses the run-time type checks
    return request


def errors(name, value):
    return requests.errors(changed(name, value), CONFIG, 2**33)


class BoundsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("id", "id", (0, LARGEST), (-1, LARGEST + 1, 0.5, True)),
        ("seed", "seed", (None, 0, LARGEST), (-1, LARGEST + 1, 0.5, True)),
        ("max_new_tokens", "max_new_tokens", (1, LARGEST), (0, LARGEST + 1, 1.5)),
        ("top_k", "top_k", (0, LARGEST), (-1, LARGEST + 1)),
        ("keep", "keep", (0, LARGEST), (-1, LARGEST + 1)),
        ("temperature", "temperature", (0, 0.0, HOTTEST), (-TINIEST, 1e39, True, "a")),
        ("top_p", "top_p", (TINIEST, 1, 1.0), (0.0, 1.001, True)),
        ("min_p", "min_p", (0, 0.0, 1.0), (-TINIEST, 1.001, False)),
        ("presence", "presence_penalty", (-100, 100.0), (-100.5, 100.5, True)),
        ("frequency", "frequency_penalty", (-100, 100.0), (-100.5, 100.5, None)),
        ("repetition", "repetition_penalty", (TINIEST, 100), (0.0, 100.5, True)),
        ("alternatives", "num_alternatives", (0, 20), (-1, 21, 0.5, True)),
        (
            "bias",
            "logit_bias",
            ({}, {0: 100.0, 399: -100}, dict.fromkeys(range(300), 1.0)),
            (
                [],
                {-1: 1.0},
                {400: 1.0},
                {0: 100.5},
                {0: -100.5},
                {0: True},
                dict.fromkeys(range(301), 1.0),
            ),
        ),
        (
            "stop_ids",
            "stop_ids",
            ((), {0, 399}, [0], (np.int32(0), np.int64(399))),
            ([-1], [400], [np.int32(-1)], [np.int32(400)], [True], "a", None),
        ),
        (
            "prompt",
            "prompt",
            ([0, 399], (0,), np.array([0, 399])),
            ([-1], [400], np.array([-1]), np.array([400]), [], (), b"ab", None),
        ),
    )
    def test_bounds(self, name, accepted, refused):
        for value in accepted:
            self.assertEqual(errors(name, value), [], value)
        for value in refused:
            self.assertLen(errors(name, value), 1, value)

    @parameterized.named_parameters(
        ("fits", 400, {7}, 0),
        ("small", 399, {7}, 1),
        ("without_ends", 400, set(), 1),
        ("ends_that_do_not_stop", 400, {7, 8}, 1),
        ("fewer_ends_than_stop_ids", 500, {6}, 0),
    )
    def test_constraints(self, vocab_size, ends, number):
        constraint = types.SimpleNamespace(vocab_size=vocab_size, ends=frozenset(ends))
        request = changed("constraint", constraint)
        object.__setattr__(request, "stop_ids", {6, 7})
        self.assertLen(requests.errors(request, CONFIG, 9), number)

    def test_errors_of_several_fields_come_together(self):
        request = dataclasses.replace(changed("top_k", -1), min_p=2.0, prompt=[])
        self.assertLen(requests.errors(request, CONFIG, 9), 3)

    def test_prompt_and_new_tokens_fit_the_cache(self):
        request = requests.Request(0, [1] * 6, 4)
        self.assertEqual(requests.errors(request, CONFIG, 10), [])
        (message,) = requests.errors(request, CONFIG, 9)
        self.assertIn("6 tokens; with 4 new ones they exceed the cache's", message)
        short = dataclasses.replace(CONFIG, max_position_embeddings=9)
        (message,) = requests.errors(request, short, 9)
        self.assertIn("exceed model.max_position_embeddings=9", message)

    def test_long_values_are_cut(self):
        for size, wanted in ((58, repr("a" * 58)), (59, "'" + "a" * 56 + "...")):
            (message,) = errors("top_p", "a" * size)
            self.assertIn(f"got {wanted};", message)

    def test_a_capacity_is_at_most_the_model_s(self):
        requests.require_positions(CONFIG, 256)
        with self.assertRaisesRegex(config_lib.InputError, "embeddings=256, got 257"):
            requests.require_positions(CONFIG, 257)


class AdjustmentsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("logit_bias", {3: 0.0}, False),
        ("presence_penalty", 0.5, True),
        ("frequency_penalty", -0.5, True),
        ("repetition_penalty", 1.5, True),
        ("repetition_penalty", 2.0, True),
        ("num_alternatives", 1, False),
    )
    def test_each_wish_needs_an_engine_with_adjustments(self, name, value, is_penalty):
        request = changed(name, value)
        self.assertTrue(request.is_adjusted)
        self.assertEqual(request.is_penalized, is_penalty)

    def test_a_plain_request_does_not(self):
        request = requests.Request(0, [1], 1)
        self.assertFalse(request.is_adjusted)
        self.assertFalse(request.is_penalized)


if __name__ == "__main__":
    environment.main()
