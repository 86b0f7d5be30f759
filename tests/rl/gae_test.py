"""Generalized advantage estimation against loops in float64."""

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.rl import gae
from tests import environment

ATOL = 1e-5  # of sums of order 1, in float32 and in another order
B, T, GAMMA = 3, 24, 0.9


def loop(values, rewards, lam, gamma):
    """The formula of one trajectory, whose places are its sampled tokens."""
    found, after, value_after = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * value_after - values[t]
        found[t] = after = delta + gamma * lam * after
        value_after = values[t]
    return found


def make(seed=0):
    """Rows of one to three episodes and padding, of several answers each."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((B, T), np.int32)
    for row, ends in enumerate(([24], [5, 13, 20], [9, 22])):
        for number, (start, end) in enumerate(
            zip([0, *ends[:-1]], ends, strict=True), 1
        ):
            segments[row, start:end] = number
    mask = (rng.random((B, T)) < 0.6) & (segments > 0)
    mask[1, 5:13] = False  # an episode without a sampled token
    values = rng.normal(size=(B, T))
    rewards = rng.normal(size=(B, T)) * (rng.random((B, T)) < 0.3)
    lambdas = rng.uniform(0.2, 1, (B, 4))[np.arange(B)[:, None], segments]
    return values, rewards, lambdas, mask, segments


def run(values, rewards, lambdas, mask, segments, gamma=GAMMA):
    floats = (np.asarray(x, np.float32) for x in (values, rewards, lambdas))
    return np.asarray(advantages(*floats, mask, segments, gamma=gamma))


advantages = jax.jit(gae.advantages, static_argnames="gamma")
returns = jax.jit(gae.returns, static_argnames="gamma")


class AdvantagesTest(parameterized.TestCase):
    @parameterized.parameters(GAMMA, 1.0)
    def test_it_is_the_loop_over_the_sampled_tokens_of_each_episode(self, gamma):
        values, rewards, lambdas, mask, segments = make()
        wanted = np.zeros((B, T))
        for row in range(B):
            for number in range(1, segments[row].max() + 1):
                (places,) = np.nonzero((segments[row] == number) & mask[row])
                if len(places):
                    lam = lambdas[row, places[0]]
                    parts = values[row, places], rewards[row, places]
                    wanted[row, places] = loop(*parts, lam, gamma)
        found = run(values, rewards, lambdas, mask, segments, gamma)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=ATOL)

    def test_an_answers_last_token_meets_the_start_of_the_next_answer(self):
        """By hand: two tokens, an observation of three, two tokens, reward 1."""
        mask = np.array([[0, 1, 1, 0, 0, 0, 1, 1]], bool)
        values = np.array([[9, 0.5, 0.25, 9, 9, 9, 0.75, 0.5]])
        rewards = np.array([[9, 0, 0, 9, 9, 9, 0, 1.0]])
        lambdas, segments = np.full((1, 8), 0.5), np.ones((1, 8), np.int32)
        found = run(values, rewards, lambdas, mask, segments, 1.0)
        deltas = [0.25 - 0.5, 0.75 - 0.25, 0.5 - 0.75, 1 - 0.5]
        a4 = deltas[3]
        a3 = deltas[2] + 0.5 * a4
        a2 = deltas[1] + 0.5 * a3
        a1 = deltas[0] + 0.5 * a2
        wanted = [[0, a1, a2, 0, 0, 0, a3, a4]]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=ATOL)

    def test_what_is_not_sampled_has_no_influence(self):
        values, rewards, lambdas, mask, segments = make()
        spoilt = (np.where(mask, x, np.nan) for x in (values, rewards, lambdas))
        found = run(*spoilt, mask, segments)
        wanted = run(values, rewards, lambdas, mask, segments)
        np.testing.assert_array_equal(found, wanted)

    def test_one_answer_and_lambda_1_give_the_return_minus_the_value(self):
        rng = np.random.default_rng(1)
        mask = np.zeros((B, T), bool)
        mask[:, 7:19] = True
        rewards = np.zeros((B, T))
        rewards[:, 18] = rng.normal(size=B)
        values, segments = rng.normal(size=(B, T)), np.ones((B, T), np.int32)
        found = run(values, rewards, np.ones((B, T)), mask, segments, 1.0)
        wanted = np.where(mask, rewards[:, [18]] - values, 0)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=ATOL)

    def test_returns_are_advantages_and_values_of_lambda_1(self):
        values, rewards, _, mask, segments = make()
        found = run(values, rewards, np.ones((B, T)), mask, segments)
        wanted = returns(rewards.astype(np.float32), mask, segments, gamma=GAMMA)
        np.testing.assert_allclose(
            found + np.where(mask, values, 0), wanted, rtol=0, atol=ATOL
        )


class LambdaTest(parameterized.TestCase):
    def test_it_grows_with_the_length(self):
        self.assertAlmostEqual(gae.adaptive_lambda(1, 1.5), 1 / 3)
        self.assertAlmostEqual(gae.adaptive_lambda(100, 1.5), 1 - 1 / 150)
        self.assertEqual(gae.adaptive_lambda(1, 0.05), 0)
        self.assertEqual(gae.adaptive_lambda(0, 1.5), gae.adaptive_lambda(1, 1.5))

    def test_the_weights_of_the_deltas_add_up_to_alpha_times_the_length(self):
        lam = gae.adaptive_lambda(20, 1.5)
        self.assertAlmostEqual(sum(lam**k for k in range(2000)), 1.5 * 20)


if __name__ == "__main__":
    environment.main()
