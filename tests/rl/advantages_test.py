"""Advantages, weights and the choice of groups, against loops over groups."""

import dataclasses
import math
import statistics

import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.environments import protocol
from glm5_jax.rl import advantages
from tests import environment
from tests.rl import faults

OK, TRUNCATED = protocol.Label.OK, protocol.Label.TRUNCATED
CRASH, TIMEOUT = protocol.Label.ENV_ERROR, protocol.Label.TIMEOUT
FLOAT64 = 1e-12


@dataclasses.dataclass(frozen=True)
class Sample:
    mask: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Episode:
    reward: protocol.Reward | None
    label: protocol.Label = OK
    samples: tuple[Sample, ...] = (Sample((False, True, True)),)
    name: int = 0


def episode(total, label=OK, tokens=(2,), name=0):
    """Returns an episode with one sample per number of trained tokens."""
    samples = tuple(Sample((False, False) + (True,) * n) for n in tokens)
    return Episode(faults.reward_of(total), label, samples, name)


def select(*groups, group_size=4, drop_equal=True):
    return advantages.select(groups, group_size=group_size, drop_equal=drop_equal)


def make_groups(seed=0, sizes=(2, 7, 3, 4)):
    """Returns groups of unequal size, whose episodes have one to three samples."""
    rng = np.random.default_rng(seed)
    return [
        [
            episode(rng.normal(), tokens=rng.integers(1, 9, rng.integers(1, 4)))
            for _ in range(size)
        ]
        for size in sizes
    ]


class GroupAdvantagesTest(parameterized.TestCase):
    @parameterized.product(
        rewards=((0.0, 1.0), (1.0, 0.0, 0.0, 1.0, 1.0), (0.1, -2.5, 3.25)),
        std=("sample", "population", "none"),
    )
    def test_against_the_standard_library(self, rewards, std):
        mean = statistics.fmean(rewards)
        scale = {
            "sample": statistics.stdev(rewards) + 1e-6,
            "population": statistics.pstdev(rewards) + 1e-6,
            "none": 1.0,
        }[std]
        found = advantages.group_advantages(rewards, std)
        expected = [(reward - mean) / scale for reward in rewards]
        np.testing.assert_allclose(found, expected, rtol=FLOAT64, atol=FLOAT64)

    def test_equal_rewards_give_exactly_zero(self):
        for std in ("sample", "population", "none"):
            found = advantages.group_advantages([0.1] * 3, std)  # mean(0.1 * 3) > 0.1
            np.testing.assert_array_equal(found, 0)

    def test_a_group_of_one(self):
        for std in ("sample", "population"):
            with self.assertRaisesRegex(config.InputError, "group_size .* got 1"):
                advantages.group_advantages([1.0], std)
        np.testing.assert_array_equal(advantages.group_advantages([1.0], "none"), 0)


class WeightsTest(parameterized.TestCase):
    def test_sequence_mean(self):
        # Mean over tokens, then over the group, then over groups, by a loop.
        groups = make_groups()
        found = iter(advantages.weigh(groups, std="none", aggregation="sequence"))
        rng = np.random.default_rng(1)
        total = expected = 0.0
        for group in groups:
            rewards = [e.reward.total for e in group]
            of_group = []
            for e in group:
                losses = []
                for sample in e.samples:
                    weighted = next(found)
                    self.assertIs(weighted.sample, sample)
                    self.assertAlmostEqual(
                        weighted.advantage, e.reward.total - np.mean(rewards)
                    )
                    token_losses = rng.normal(size=len(sample.mask))
                    losses += list(token_losses[np.array(sample.mask)])
                    total += weighted.weight * np.sum(token_losses * sample.mask)
                of_group.append(statistics.fmean(losses))
            expected += statistics.fmean(of_group) / len(groups)
        self.assertAlmostEqual(total, expected, places=12)
        self.assertIsNone(next(found, None))

    def test_token_mean(self):
        groups = make_groups()
        found = advantages.weigh(groups, std="sample", aggregation="token")
        count = sum(sum(w.sample.mask) for w in found)
        self.assertEqual({w.weight for w in found}, {1 / count})

    @parameterized.parameters("sequence", "token")
    def test_weights_of_all_tokens_sum_to_one(self, aggregation):
        found = advantages.weigh(make_groups(), std="none", aggregation=aggregation)
        total = math.fsum(w.weight * sum(w.sample.mask) for w in found)
        self.assertAlmostEqual(total, 1.0, places=12)

    def test_nothing_was_sampled(self):
        for aggregation in ("token", "sequence"):
            found = advantages.token_weights([[0, 0]], aggregation)
            self.assertEqual(
                found, [[1.0, 1.0] if aggregation == "token" else [0.5] * 2]
            )

    def test_forks_share_their_episodes_weight_by_tokens(self):
        whole = [episode(1.0, tokens=(8,)), episode(0.0, tokens=(5,))]
        forked = [episode(1.0, tokens=(2, 6)), episode(0.0, tokens=(5,))]
        a, _ = advantages.weigh([whole], std="sample", aggregation="sequence")
        b, c, _ = advantages.weigh([forked], std="sample", aggregation="sequence")
        self.assertEqual((b.weight, c.weight), (a.weight, a.weight))
        self.assertEqual((b.advantage, c.advantage), (a.advantage, a.advantage))

    def test_an_empty_response_counts_in_its_group(self):
        group = [episode(1.0, tokens=(4,)), episode(0.0, tokens=(0,))]
        a, b = advantages.weigh([group], std="none", aggregation="sequence")
        self.assertEqual(a.weight, 1 / 2 / 4)
        self.assertTrue(math.isfinite(b.weight))

    def test_unequal_groups_do_not_mix(self):
        # slime once made one row of groups of unequal size, so that a group's
        # advantages depended on its neighbours.
        groups = make_groups()
        whole = advantages.weigh(groups, std="sample", aggregation="sequence")
        alone = [
            w.advantage
            for group in groups
            for w in advantages.weigh([group], std="sample", aggregation="sequence")
        ]
        self.assertEqual([w.advantage for w in whole], alone)


class SelectTest(parameterized.TestCase):
    @parameterized.named_parameters(*((f"{n}_valid", n) for n in range(5)))
    def test_more_than_half_valid_or_dropped(self, num_valid):
        valid = [episode(i, name=i) for i in range(num_valid)]
        broken = [episode(9.0, CRASH, name=-1) for _ in range(4 - num_valid)]
        kept, counts = select([*broken, *valid])
        self.assertEqual(counts["excluded_env_error"], 4 - num_valid)
        if num_valid <= 2:
            self.assertEqual((kept, counts["dropped_invalid_groups"]), ([], 1))
            return
        names = [e.name for e in kept[0]]
        self.assertEqual(names, [0, 1, 2, 0] if num_valid == 3 else [0, 1, 2, 3])
        self.assertEqual(counts["repeated_episodes"], 4 - num_valid)
        self.assertEqual(counts["padded_groups"], int(num_valid == 3))
        self.assertEqual(counts["kept_groups"], 1)

    def test_episodes_that_are_repeated_are_those_kept(self):
        group = [episode(1.0), episode(0.0), episode(0.5), episode(0.0, TIMEOUT)]
        kept, _ = select(group)
        self.assertIs(kept[0][3], group[0])

    def test_they_are_repeated_in_turn(self):
        group = [episode(i, name=i) for i in range(4)]
        kept, counts = select(group, group_size=7)
        self.assertEqual([e.name for e in kept[0]], [0, 1, 2, 3, 0, 1, 2])
        self.assertEqual(counts["repeated_episodes"], 3)

    @parameterized.parameters((1.9e-6, False), (2e-6, True))
    def test_the_least_difference_that_teaches(self, total, want):
        """Two rewards deviate from their mean by half of their difference."""
        self.assertEqual(advantages.teaches([episode(0.0), episode(total)]), want)

    @parameterized.parameters(math.nan, math.inf, -math.inf, "1.0", None)
    def test_a_reward_that_is_no_finite_number(self, total):
        kept, counts = select(
            [episode(1.0), episode(0.0), episode(0.5), episode(total)]
        )
        self.assertEqual(counts["excluded_reward_error"], 1)
        self.assertEqual([e.reward.total for e in kept[0]], [1.0, 0.0, 0.5, 1.0])

    def test_no_reward_at_all(self):
        _, counts = select([Episode(None)] * 4)
        self.assertEqual(counts["excluded_reward_error"], 4)
        self.assertEqual(counts["dropped_invalid_groups"], 1)

    def test_errors_are_not_rewards_of_zero(self):
        # Three successes and a crash teach nothing; a crash must not score 0.
        kept, counts = select([episode(1.0)] * 3 + [episode(0.0, CRASH)])
        self.assertEqual((kept, counts["dropped_equal_groups"]), ([], 1))

    def test_truncated_episodes_are_scored(self):
        kept, _ = select([episode(float(i == 0), TRUNCATED) for i in range(4)])
        self.assertLen(kept, 1)

    def test_groups_of_equal_rewards(self):
        equal = [episode(0.1)] * 4
        kept, counts = select(equal)
        self.assertEqual((kept, counts["dropped_equal_groups"]), ([], 1))
        kept, counts = select(equal, drop_equal=False)
        self.assertEqual((len(kept), counts["dropped_equal_groups"]), (1, 0))

    def test_counts_close(self):
        rng = np.random.default_rng(0)
        labels = list(protocol.Label)
        groups = [
            [episode(float(rng.integers(2)), rng.choice(labels)) for _ in range(4)]
            for _ in range(200)
        ]
        kept, counts = select(*groups)
        dropped = counts["dropped_invalid_groups"] + counts["dropped_equal_groups"]
        self.assertEqual(counts["groups"], 200)
        self.assertEqual(counts["kept_groups"], len(kept))
        self.assertEqual(counts["groups"], len(kept) + dropped)
        self.assertEqual({len(group) for group in kept}, {4})
        excluded = sum(n for k, n in counts.items() if k.startswith("excluded_"))
        invalid = sum(e.label not in (OK, TRUNCATED) for g in groups for e in g)
        self.assertEqual((excluded, counts["episodes"]), (invalid, 800))
        self.assertGreater(min(dropped, len(kept), counts["padded_groups"]), 0)


if __name__ == "__main__":
    environment.main()
