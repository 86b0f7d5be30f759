"""Intervals against their formulas with tabulated quantiles, and against scipy."""

import math

import numpy as np
from absl.testing import absltest, parameterized
from scipy import stats

from glm5_jax import intervals
from tests import environment

# Quantiles of 97.5% as tables print them: Student's t by degrees of freedom.
T = {1: 12.7062, 2: 4.30265, 4: 2.77645}


class MeanTest(parameterized.TestCase):
    @parameterized.parameters(((1.0, 3.0),), ((0.1, 0.2, 0.6),), ((5, 1, 2, 2, 9),))
    def test_it_is_students(self, values):
        found = intervals.mean_interval(values)
        n = len(values)
        spread = T[n - 1] * np.std(values, ddof=1) / math.sqrt(n)
        self.assertAlmostEqual(found.mean, np.mean(values))
        self.assertAlmostEqual(found.high - found.mean, spread, delta=1e-5 * spread)
        self.assertAlmostEqual(found.mean - found.low, spread, delta=1e-5 * spread)
        self.assertEqual(found.count, n)

    def test_one_value_has_no_ends_and_none_no_mean(self):
        found = intervals.mean_interval([2.5])
        self.assertEqual((found.mean, found.count), (2.5, 1))
        self.assertTrue(math.isnan(found.low) and math.isnan(found.high))
        with self.assertRaisesRegex(ValueError, "at least one value"):
            intervals.mean_interval([])

    def test_it_covers_the_mean_as_often_as_it_says(self):
        draws = np.random.default_rng(0).normal(3, 2, (1000, 4))
        found = [intervals.mean_interval(row, 0.8) for row in draws]
        covered = np.mean([f.low < 3 < f.high for f in found])
        self.assertAlmostEqual(covered, 0.8, delta=0.04)  # three standard errors


class RatioTest(absltest.TestCase):
    def test_the_ratio_weighs_parts_and_equal_ratios_leave_no_doubt(self):
        found = intervals.ratio_interval([2.0, 6.0, 10.0], [1, 3, 5])
        self.assertEqual((found.mean, found.low, found.high), (2.0, 2.0, 2.0))

    def test_its_error_is_that_of_the_residuals(self):
        found = intervals.ratio_interval([1.0, 4.0, 1.0], [1.0, 2.0, 1.0])
        residuals = np.array([1.0, 4.0, 1.0]) - 1.5 * np.array([1.0, 2.0, 1.0])
        error = np.sqrt(3 / 2 * np.sum(residuals**2)) / 4
        self.assertAlmostEqual(found.mean, 1.5)
        self.assertAlmostEqual(found.high, 1.5 + T[2] * error, places=4)


class PairedTest(absltest.TestCase):
    def test_shared_seeds_alone_count(self):
        ours, theirs = {0: 3.0, 1: 5.0, 7: 100.0}, {1: 4.0, 0: 1.0, 9: -100.0}
        found = intervals.paired_difference(ours, theirs)
        self.assertEqual(found, intervals.mean_interval([2.0, 1.0]))

    def test_a_constant_difference_has_no_width_however_seeds_vary(self):
        found = intervals.paired_difference({0: 9.0, 1: 1.0}, {0: 8.0, 1: 0.0})
        self.assertEqual((found.mean, found.low, found.high), (1.0, 1.0, 1.0))

    def test_without_a_shared_seed_it_is_refused(self):
        with self.assertRaisesRegex(ValueError, "same seeds"):
            intervals.paired_difference({0: 1.0}, {1: 1.0})


class ProportionTest(parameterized.TestCase):
    @parameterized.parameters((0, 7), (3, 7), (7, 7), (50, 100))
    def test_it_is_wilsons(self, successes, trials):
        found = intervals.proportion_interval(successes, trials, 0.9)
        oracle = stats.binomtest(successes, trials).proportion_ci(0.9, "wilson")
        self.assertEqual((found.mean, found.count), (successes / trials, trials))
        self.assertAlmostEqual(found.low, oracle.low)
        self.assertAlmostEqual(found.high, oracle.high)

    def test_no_trials_exclude_nothing(self):
        found = intervals.proportion_interval(0, 0)
        self.assertTrue(math.isnan(found.mean))
        self.assertEqual((found.low, found.high, found.count), (0.0, 1.0, 0))


if __name__ == "__main__":
    environment.main()
