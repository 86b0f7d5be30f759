"""Bias, penalties and more log-probs against a loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import adjustments, engine, requests
from tests import environment, small_configs
from tests.model import tiny

VOCAB, CAPACITY = 30, 12
LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCAB)) * 3, jnp.float32)
ATOL = 1e-5  # float32 against float64


def request(**wishes):
    return requests.Request(id=0, prompt=[1, 2, 2], max_new_tokens=1, **wishes)


def by_hand(logits, asked, drawn):
    """Returns the logits as the docstrings of Request's fields describe them."""
    logits = np.asarray(logits, np.float64)
    for token in {*asked.prompt, *drawn}:
        factor = asked.repetition_penalty
        logits[token] *= 1 / factor if logits[token] > 0 else factor
    for token in {*drawn}:
        logits[token] -= asked.presence_penalty
    for token in drawn:
        logits[token] -= asked.frequency_penalty
    for token, bias in asked.logit_bias.items():
        logits[token] += bias
    return logits


class ApplyTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("presence", {"presence_penalty": 0.7}),
        ("frequency", {"frequency_penalty": -0.4}),
        ("repetition", {"repetition_penalty": 1.3}),
        ("bias", {"logit_bias": {0: -100.0, 29: 2.5}}),
        (
            "all",
            {
                "presence_penalty": 0.5,
                "frequency_penalty": 1.5,
                "repetition_penalty": 0.8,
                "logit_bias": {4: 1.0},
            },
        ),
    )
    def test_against_a_loop(self, wishes):
        """Of three rows one asks for nothing and one has drawn nothing."""
        rows = [(request(**wishes), [2, 4, 4, 7]), None, (request(**wishes), [])]
        made = adjustments.make(rows, CAPACITY)
        # The last token of the first row comes as the device writes it.
        ids, positions = jnp.array([9, 3, 3]), jnp.array([7, 5, 3])
        made = adjustments.with_tokens(made, positions, ids)
        got = jax.jit(adjustments.apply)(LOGITS, made)
        want = [
            by_hand(LOGITS[0], request(**wishes), [2, 4, 4, 7, 9]),
            LOGITS[1],
            by_hand(LOGITS[2], request(**wishes), [3]),
        ]
        np.testing.assert_allclose(got, want, atol=ATOL)

    def test_logits_stay_finite_with_any_repetition_penalty(self):
        made = adjustments.make([(request(repetition_penalty=1e-39), [2])], CAPACITY)
        self.assertTrue(np.isfinite(adjustments.apply(LOGITS[:1], made)).all())

    @parameterized.parameters(
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 2.0),
    )
    def test_a_penalty_that_all_rows_have(self, name, value):
        asked, drawn = request(**{name: value}), [*range(4, 12)]
        got = adjustments.apply(
            LOGITS, adjustments.make([(asked, drawn)] * 3, CAPACITY)
        )
        want = [by_hand(row, asked, drawn) for row in LOGITS]
        np.testing.assert_allclose(got, want, atol=ATOL)


class DetailsTest(parameterized.TestCase):
    @parameterized.parameters(0, 3)
    def test_logprobs_are_the_model_s(self, number):
        rows = [(request(num_alternatives=number), ()), None, None]
        ids = jnp.array([5, 0, 29])
        found = adjustments.details(LOGITS, ids, adjustments.make(rows, CAPACITY))
        exact = np.asarray(LOGITS, np.float64)
        exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
        want = np.take_along_axis(exact, np.asarray(ids)[:, None], 1)[:, 0]
        np.testing.assert_allclose(found.raw_logprobs, want, atol=ATOL)
        if number:
            order = np.argsort(-exact, axis=1)[:, : requests.MAX_ALTERNATIVES]
            np.testing.assert_array_equal(found.alternatives, order)
            want = np.take_along_axis(exact, order, 1)
            np.testing.assert_allclose(found.logprobs, want, atol=ATOL)
        else:  # nobody asked: to look for them would cost a sort
            self.assertFalse(np.any(found.alternatives))
            self.assertFalse(np.any(found.logprobs))


class ChecksTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"logit_bias": {80: 1.0}}, "logit_bias must have ids"),
        ({"logit_bias": {0: float("nan")}}, "logit_bias must lie"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "at most 300"),
        ({"presence_penalty": float("nan")}, "presence_penalty must lie"),
        ({"frequency_penalty": 1e9}, "frequency_penalty must lie"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must lie"),
        ({"num_alternatives": 21}, "num_alternatives must be"),
    )
    def test_wrong_wishes(self, wishes, message):
        found = requests.errors(request(**wishes), tiny.model(), 100)
        self.assertLen(found, 1)
        self.assertRegex(found[0], message)

    def test_an_engine_without_room_for_them_refuses(self):
        model = small_configs.DENSE_MODEL
        made = engine.Engine(tiny.params(model), model, num_slots=1, capacity=8)
        with self.assertRaisesRegex(config_lib.InputError, "with_adjustments=True"):
            made.check(request(presence_penalty=1.0))


if __name__ == "__main__":
    environment.main()
