"""Compares sampled frequencies with the distribution in closed form."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import engine, sampling
from tests import environment

LOGITS = np.array([2.0, -1.0, 0.5, 1.5, 0.0, -3.0], np.float32)
NUM_DRAWS = 20_000
FREQUENCY_ATOL = 0.015  # four standard deviations of a frequency of 0.5
LOGPROB_ATOL = 1e-5


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def draw(**options):
    """Draws for NUM_DRAWS requests from the same logits."""
    return jax.jit(sampling.sample)(
        jnp.broadcast_to(LOGITS, (NUM_DRAWS, LOGITS.size)),
        sampling.request_keys(0, jnp.arange(NUM_DRAWS)),
        jnp.zeros(NUM_DRAWS, jnp.int32),
        sampling.make_sampling(NUM_DRAWS, **options),
    )


class SampleTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("plain", {}, range(6)),
        ("cold", {"temperature": 0.5}, range(6)),
        ("hot", {"temperature": 3.0}, range(6)),
        # Masses at temperature 1: 0.50, 0.30, 0.11, 0.07 ... in the order 0 3 2 4 1 5.
        ("top_p", {"top_p": 0.7}, [0, 3]),
        ("wide_top_p", {"top_p": 0.92}, [0, 3, 2, 4]),
        ("least_top_p", {"top_p": 1e-6}, [0]),
        ("zero_in_float32_top_p", {"top_p": 1e-50}, [0]),
        ("top_k", {"top_k": 3}, [0, 3, 2]),
        ("top_k_then_top_p", {"top_k": 3, "top_p": 0.8}, [0, 3]),
        ("one", {"top_k": 1}, [0]),
        ("min_p", {"min_p": 0.2}, [0, 3, 2]),
        ("whole_min_p", {"min_p": 1.0}, [0]),
        ("cold_top_p", {"temperature": 0.5, "top_p": 0.9}, [0, 3]),
    )
    def test_frequencies_and_logprobs(self, options, kept):
        kept = list(kept)
        scaled = LOGITS / options.get("temperature", 1.0)
        probs = np.zeros(LOGITS.size)
        probs[kept] = softmax(scaled[kept])
        ids, logprobs = draw(**options)
        frequencies = np.bincount(ids, minlength=LOGITS.size) / NUM_DRAWS
        np.testing.assert_allclose(frequencies, probs, atol=FREQUENCY_ATOL)
        self.assertContainsSubset(set(np.asarray(ids).tolist()), kept)
        np.testing.assert_allclose(
            logprobs, np.log(probs[np.asarray(ids)]), atol=LOGPROB_ATOL
        )

    def test_logits_stay_finite_at_any_temperature(self):
        logits = jnp.broadcast_to(LOGITS, (1, LOGITS.size)) * 100
        how = sampling.make_sampling(1, temperature=2e-38)
        self.assertTrue(np.isfinite(sampling.scaled_logits(logits, how)).all())

    def test_a_mass_that_is_reached_needs_no_further_token(self):
        ordered = jnp.sort(LOGITS, descending=True)
        masses = np.cumsum(np.asarray(jax.nn.softmax(ordered)), dtype=np.float32)
        logits = jnp.broadcast_to(LOGITS, (LOGITS.size, LOGITS.size))
        how = dataclasses.replace(sampling.make_sampling(6), top_p=jnp.asarray(masses))
        kept = np.isfinite(sampling.scaled_logits(logits, how)).sum(axis=1)
        np.testing.assert_array_equal(kept, [1, 2, 3, 4, 5, 6])

    def test_no_token_is_lost_where_none_is_filtered(self):
        """Also if the masses of the others round to a sum of 1."""
        logits = np.random.default_rng(0).normal(size=(4, 1000)) * 6
        logits = jnp.asarray(logits, jnp.float32)
        how = sampling.make_sampling(4, top_k=1000)
        np.testing.assert_array_equal(sampling.scaled_logits(logits, how), logits)

    def test_by_default_every_command_draws_from_the_whole_distribution(self):
        """As test_frequencies_and_logprobs_plain does."""
        whole, request = sampling.make_sampling(1), engine.Request(0, (1,), 1)
        for name in ("temperature", "top_p", "top_k", "min_p"):
            self.assertEqual(getattr(request, name), getattr(whole, name)[0])
        options = inspect.signature(engine.generate).parameters
        for name in ("temperature", "top_p"):
            self.assertEqual(options[name].default, getattr(whole, name)[0])
        self.assertEqual((request.stop_ids, request.keep), (frozenset(), 0))

    def test_greedy_takes_the_best_and_gives_the_models_logprob(self):
        ids, logprobs = draw(temperature=0.0, top_p=0.1)
        np.testing.assert_array_equal(ids, 0)
        expected = np.log(softmax(LOGITS)[0])
        np.testing.assert_allclose(logprobs, expected, atol=LOGPROB_ATOL)

    def test_rows_of_a_batch_are_sampled_each_in_its_way(self):
        logits = jnp.broadcast_to(LOGITS, (3, LOGITS.size))
        how = sampling.Sampling(
            temperature=jnp.array([0.0, 1.0, 2.0]),
            top_p=jnp.array([0.5, 1.0, 0.7]),
            top_k=jnp.array([0, 2, 0]),
            min_p=jnp.zeros(3),
        )
        scaled = np.asarray(sampling.scaled_logits(logits, how))
        np.testing.assert_array_equal(scaled[0], LOGITS)
        np.testing.assert_array_equal(np.isfinite(scaled[1]).nonzero()[0], [0, 3])
        np.testing.assert_array_equal(scaled[2, [0, 3]], LOGITS[[0, 3]] / 2)
        self.assertEqual(np.isfinite(scaled[2]).sum(), 3)

    def test_a_draw_depends_on_key_request_and_position(self):
        keys = sampling.request_keys(3, jnp.arange(4))
        np.testing.assert_array_equal(
            jax.random.key_data(keys[:2]),
            jax.random.key_data(sampling.request_keys(3, jnp.arange(2))),
        )
        logits = jnp.zeros((4, 1000))
        how = sampling.make_sampling(4)
        sample = jax.jit(sampling.sample)
        at = lambda position: sample(logits, keys, np.full(4, position, np.int32), how)[
            0
        ]
        self.assertLen(set(np.asarray(at(5)).tolist()), 4)
        np.testing.assert_array_equal(at(5), at(5))
        self.assertFalse(np.array_equal(at(5), at(6)))


if __name__ == "__main__":
    environment.main()
