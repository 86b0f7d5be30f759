"""Episodes: as drawn, against closed forms, and within the config's limits."""

import math
import random
import statistics
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.scale.rl import tasks
from tests import environment

WIDE = tasks.Limits(turns=10_000, turn_tokens=10**7, row_tokens=10**9)
FIXED = tasks.Kind(
    prompt=tasks.Size(100, 0),
    turns=tasks.Size(3, 0),
    drawn=tasks.Size(10, 0),
    observed=tasks.Size(40, 0),
    tool_seconds=tasks.Size(2.5, 0),
)


def mixture(kind=FIXED, limits=WIDE, **more):
    return tasks.Mixture(kinds={"x": kind}, shares=[("x", 1.0)], limits=limits, **more)


class EpisodeTest(parameterized.TestCase):
    def test_fixed_sizes_by_hand(self):
        episode = mixture().episode(5, 7)
        self.assertEqual(episode.read, (100, 40, 40))
        self.assertEqual([t.tokens for t in episode.turns], [10, 10, 10])
        self.assertEqual([t.seconds for t in episode.turns], [2.5, 2.5, 2.5])
        self.assertEqual((episode.drawn, episode.length), (30, 210))

    def test_means_by_hand(self):
        """Turns begin at 100, 150 and 200 tokens; a half of the 10 drawn comes on."""
        found = mixture().summary
        self.assertEqual((found.drawn, found.length, found.turns), (30, 210, 3))
        self.assertAlmostEqual(found.tool_seconds, 7.5)
        self.assertAlmostEqual(found.context, (105 + 155 + 205) / 3)
        self.assertAlmostEqual(found.read, 180 / 30)
        self.assertAlmostEqual(found.share_drawn, 1 / 7)

    def test_a_lost_cache_is_read_again(self):
        """The second turn reads 110 tokens again, the third 160; of these a half."""
        found = mixture(reread=0.5).summary
        self.assertAlmostEqual(found.read, (180 + 0.5 * (110 + 160)) / 30)

    def test_an_episode_ends_where_its_row_is_full(self):
        episode = mixture(limits=tasks.Limits(turns=9, turn_tokens=8, row_tokens=152))
        found = episode.episode(0, 0)
        self.assertEqual(found.read, (100, 40))  # 108, 148: 4 tokens are left
        self.assertEqual([t.tokens for t in found.turns], [8, 4])

    @parameterized.parameters(*tasks.KINDS)
    def test_limits_hold(self, name):
        limits = tasks.Limits(turns=20, turn_tokens=1_000, row_tokens=8_000)
        episodes = mixture(tasks.KINDS[name], limits)
        for group in range(50):
            found = episodes.episode(group, 1)
            self.assertBetween(len(found.turns), 1, 20)
            self.assertBetween(min(t.tokens for t in found.turns), 1, 1_000)
            self.assertLessEqual(max(t.tokens for t in found.turns), 1_000)
            self.assertLessEqual(found.length, 8_000)
            self.assertGreaterEqual(min(found.read), 0)

    def test_the_same_episode_is_drawn_again_and_others_differ(self):
        episodes = mixture(tasks.KINDS["search"])
        self.assertEqual(episodes.episode(3, 1), episodes.episode(3, 1))
        self.assertNotEqual(episodes.episode(3, 1), episodes.episode(3, 2))
        other = mixture(tasks.KINDS["search"], seed=1)
        self.assertNotEqual(episodes.episode(3, 1), other.episode(3, 1))

    def test_sizes_are_lognormal(self):
        """Of 4,000 logarithms mean and deviation, within five standard errors."""
        kind = tasks.KINDS["coding"]
        episodes = mixture(kind)
        seconds = [
            math.log(turn.seconds)
            for group in range(120)
            for turn in episodes.episode(group, 0).turns
        ]
        number, size = len(seconds), kind.tool_seconds
        self.assertGreater(number, 4_000)
        error = 5 * size.spread / math.sqrt(number)
        mean = statistics.fmean(seconds)
        self.assertAlmostEqual(mean, math.log(size.median), delta=error)
        self.assertAlmostEqual(statistics.stdev(seconds), size.spread, delta=error)

    def test_groups_are_of_one_kind_in_their_shares(self):
        kinds = {"one": FIXED, "two": tasks.KINDS["reasoning"]}
        shares = [("one", 3.0), ("two", 1.0)]
        both = tasks.Mixture(kinds=kinds, shares=shares, limits=WIDE)
        is_one = [both.episode(group, 0).length == 210 for group in range(800)]
        again = [both.episode(group, 5).length == 210 for group in range(800)]
        self.assertEqual(is_one, again)
        self.assertAlmostEqual(statistics.fmean(is_one), 0.75, delta=5 * 0.0153)
        self.assertEqual(is_one, [both.part(group) == 0 for group in range(800)])


class FlagsTest(parameterized.TestCase):
    def test_sizes_and_shares(self):
        self.assertEqual(tasks.parse_size("turns", "40"), tasks.Size(40, 0))
        self.assertEqual(tasks.parse_size("turns", "4e2:0.5"), tasks.Size(400, 0.5))
        self.assertEqual(tasks.parse_shares("coding"), [("coding", 1.0)])
        shares = tasks.parse_shares("coding:2, search:0.5")
        self.assertEqual(shares, [("coding", 2.0), ("search", 0.5)])
        shares = tasks.parse_shares("coding:3,search:1,coding:1")
        self.assertEqual(shares, [("coding", 3.0), ("search", 1.0), ("coding", 1.0)])

    @parameterized.parameters(
        "", "x", "-1", "1:-1", "1:2:3", "nan", "inf:1", "1:nan", "1:800", "1e308:3"
    )
    def test_wrong_sizes_name_the_flag(self, text):
        with self.assertRaisesRegex(config_lib.InputError, "--turns must be MEDIAN"):
            tasks.parse_size("turns", text)

    def test_the_largest_sizes_can_be_drawn(self):
        size = tasks.parse_size("drawn", f"{tasks.MOST_MEDIAN}:{tasks.MOST_SPREAD}")
        rng = mock.Mock(random.Random)
        rng.gauss.return_value = 9.0  # more than 53 bits give: 8.6
        self.assertLess(size.draw(rng), math.inf)

    @parameterized.parameters("", "cooking", "coding:0", "coding:x", "coding:-1")
    def test_wrong_shares_name_the_kinds(self, text):
        with self.assertRaisesRegex(config_lib.InputError, "reasoning, coding, search"):
            tasks.parse_shares(text)


if __name__ == "__main__":
    environment.main()
