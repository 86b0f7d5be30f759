"""The paper's Eq. 1 as a whole, and the purpose of importance weights."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax import config
from glm5_jax.environments import protocol
from glm5_jax.rl import advantages, objectives
from tests import environment

GROUP_SIZES = (4, 2, 5)
PROMPT, LONGEST = 3, 9
FLOAT32 = 1e-6  # absolute, for a mean of terms of order 1


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt and a response, with the response's log-probs in float64."""

    mask: list[bool]
    trained: np.ndarray
    old: np.ndarray
    rollout: np.ndarray


@dataclasses.dataclass(frozen=True)
class Episode:
    reward: protocol.Reward
    samples: tuple[Sample, ...]
    label: protocol.Label = protocol.Label.OK


def make_groups():
    rng = np.random.default_rng(0)

    def make_episode():
        length = rng.integers(1, LONGEST + 1)
        rollout = np.log(rng.uniform(0.05, 0.95, length))
        old = rollout + 0.5 * rng.standard_normal(length)
        trained = old + 0.2 * rng.standard_normal(length)
        mask = [False] * PROMPT + [True] * int(length)
        sample = Sample(mask, trained, old, rollout)
        return Episode(protocol.Reward(float(rng.integers(0, 4))), (sample,))

    return [[make_episode() for _ in range(size)] for size in GROUP_SIZES]


def equation_1(groups):
    """L = -mean_x 1/G sum_i 1/|y_i| sum_t pop(rho) min(r A, clip(r) A)."""
    total = 0.0
    for group in groups:
        rewards = [episode.reward.total for episode in group]
        mean = sum(rewards) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(group) - 1))
        of_group = 0.0
        for episode, reward in zip(group, rewards, strict=True):
            advantage = (reward - mean) / (std + 1e-6)
            (y,) = episode.samples
            of_episode = 0.0
            for trained, old, rollout in zip(y.trained, y.old, y.rollout, strict=True):
                rho, r = math.exp(old - rollout), math.exp(trained - old)
                pop = rho if 0.5 <= rho <= 2 else 0.0
                clipped = min(max(r, 0.8), 1.28)
                of_episode += pop * min(r * advantage, clipped * advantage)
            of_group += of_episode / len(y.trained)
        total -= of_group / len(group) / len(groups)
    return total


def padded(rows, width):
    """Returns a learner's rows, whose prompts are zeros."""
    found = np.zeros((len(rows), width))
    for i, row in enumerate(rows):
        found[i, PROMPT : PROMPT + len(row)] = row
    return jnp.asarray(found, jnp.float32)


class EquationTest(absltest.TestCase):
    def test_icepop_is_equation_1(self):
        groups = make_groups()
        weighted = advantages.weigh(groups, std="sample", aggregation="sequence")
        icepop = objectives.of(config.RLConfig(objective="icepop"))
        for width in (PROMPT + LONGEST, PROMPT + LONGEST + 7):
            samples = [w.sample for w in weighted]
            mask = padded([s.mask[PROMPT:] for s in samples], width)
            columns = [padded([getattr(s, k) for s in samples], width) for k in KEYS]
            advantage = jnp.array([w.advantage for w in weighted])[:, None] * mask
            weights = jnp.array([w.weight for w in weighted])[:, None] * mask
            found = jax.jit(icepop)(*columns, advantage, mask > 0)
            loss = jnp.sum(weights * found.loss)
            np.testing.assert_allclose(loss, equation_1(groups), atol=FLOAT32)
            self.assertGreater(found.metrics.num_masked, 0)
            self.assertGreater(found.metrics.num_clipped, 0)


class EstimatorTest(absltest.TestCase):
    """The expected gradient over all one-token answers, if the engine is inexact."""

    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.logits = jnp.asarray(rng.standard_normal(8), jnp.float32)
        noise = jnp.asarray(0.4 * rng.standard_normal(8), jnp.float32)
        self.rollout = jax.nn.log_softmax(self.logits + noise)
        self.rewards = jnp.asarray(rng.standard_normal(8), jnp.float32)
        reward = lambda x: -jnp.vdot(jax.nn.softmax(x), self.rewards)
        self.exact = jax.jit(jax.grad(reward))(self.logits)

    def expected_gradient(self, name, **settings):
        """sum_y pi_infer(y) d/dlogits loss(y): the probabilities are the weights."""
        wide = {"pop_beta": 1e3, "tis_cap": 1e3, "dis_low": 1.0, "dis_high": 1e3}
        rl = config.RLConfig(objective=name, **(wide | settings))
        objective = objectives.of(rl)

        def loss(logits):
            logprobs = jax.nn.log_softmax(logits)
            mask = jnp.ones(8, bool)
            found = objective(logprobs, None, self.rollout, self.rewards, mask)
            return jnp.vdot(jnp.exp(self.rollout), found.loss)

        return jax.jit(jax.grad(loss))(self.logits)

    def test_weights_undo_the_mismatch(self):
        for name in ("icepop", "tis", "dis"):
            np.testing.assert_allclose(
                self.expected_gradient(name), self.exact, atol=FLOAT32
            )

    def test_without_weights_or_in_a_band_it_is_biased(self):
        def error(name, **settings):
            found = self.expected_gradient(name, **settings)
            return float(jnp.linalg.norm(found - self.exact))

        size = float(jnp.linalg.norm(self.exact))
        self.assertGreater(error("grpo"), 0.1 * size)
        self.assertGreater(error("icepop", pop_beta=1.2), 0.1 * size)
        # Every ratio is within this band.
        self.assertLess(error("icepop", pop_beta=4.0), 1e-5 * size)


KEYS = ("trained", "old", "rollout")


if __name__ == "__main__":
    environment.main()
