"""Mixtures: proportions, order, and changes of weights."""

import collections
import fractions
import math

import numpy as np
from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.data.rows import mixture
from glm5_jax.data.rows import schedule as schedule_lib
from tests import environment

WEIGHTS = [
    (1,),
    (1, 1),
    (7, 3),
    (1, 0, 2),
    (1, 1, 1, 997),
    (30, 20, 10, 5, 5, 3, 1),
    tuple(range(1, 40)),
]


class Numbered:
    """Rows that hold their own number."""

    def __init__(self, name, size):
        self.name, self.size = name, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"row": np.array([self.name, index])}


def schedule(*stages):
    return schedule_lib.Schedule([schedule_lib.Stage(*stage) for stage in stages])


class EvenOrderTest(parameterized.TestCase):
    @parameterized.parameters(*[(w,) for w in WEIGHTS])
    def test_never_a_row_off_the_exact_share(self, weights):
        order = schedule_lib.even_order(weights)
        used = np.cumsum(order[:, None] == np.arange(len(weights)), axis=0)
        places = np.arange(1, order.size + 1)[:, None]
        # In whole numbers: |used / places - weight / sum| < 1 / places.
        errors = np.abs(used * sum(weights) - places * np.array(weights))
        self.assertLess(errors.max(), sum(weights))
        np.testing.assert_array_equal(used[-1], weights)

    @parameterized.parameters((1, 2), (3, 1), (2, 3, 1), (1, 0, 2), (4, 1, 1, 5))
    def test_the_released_row_that_is_due_first_comes_next(self, *weights):
        total, used, want = sum(weights), [0] * len(weights), []
        for place in range(total):
            rows = [
                (math.ceil(fractions.Fraction((used[i] + 1) * total, w)), i)
                for i, w in enumerate(weights)
                if w and used[i] * total // w <= place
            ]
            want.append(min(rows)[1])
            used[want[-1]] += 1
        self.assertEqual(schedule_lib.even_order(weights).tolist(), want)

    @parameterized.parameters(
        ((0.7, 0.3), (7, 3)),
        ((0.1, 0.2, 0.7), (1, 2, 7)),
        ((2.0, 6.0), (1, 3)),
        ((0.25, 0.0), (1, 0)),
        ((1e-4, 1.0), (1, 10_000)),
    )
    def test_weights_are_taken_as_written(self, weights, want):
        self.assertEqual(schedule_lib.shares(weights), want)

    def test_weights_of_too_many_digits(self):
        with self.assertRaisesRegex(config.InputError, "fewer digits"):
            schedule_lib.shares((0.123456789, 1.0))

    def test_a_cycle_has_a_hundred_thousand_rows_at_most(self):
        self.assertEqual(schedule_lib.shares((1.0, 99_999.0)), (1, 99_999))
        with self.assertRaisesRegex(config.InputError, "sum is 100001, .* 100000;"):
            schedule_lib.shares((1.0, 100_000.0))


class ScheduleTest(parameterized.TestCase):
    def test_each_row_of_a_source_comes_once_across_stages(self):
        weights = (0.5, 0.3, 0.2), (0.0, 1.0, 0.0), (0.5, 0.25, 0.25)
        plan = schedule(*zip((0, 13, 20), weights, strict=True))
        seen = [[], [], []]
        for index in range(60):
            counts = plan.counts(index)
            np.testing.assert_array_equal(counts, [len(s) for s in seen])
            source, place = plan.locate(index)
            seen[source].append(place)
        for places in seen:
            self.assertEqual(places, [*range(len(places))])
        self.assertEqual({plan.locate(i)[0] for i in range(13, 20)}, {1})

    def test_far_away_rows_need_no_walk(self):
        plan = schedule((0, (3.0, 7.0)))
        index = 10**12 + 3
        source, place = plan.locate(index)
        self.assertEqual(place, plan.counts(index)[source])
        self.assertAlmostEqual(plan.counts(10**12)[0] / 10**12, 0.3)


class MixtureTest(parameterized.TestCase):
    def make(self, seed=0, sizes=(10, 4)):
        rows = {str(i): Numbered(i, size) for i, size in enumerate(sizes)}
        return mixture.Mixture(rows, schedule((0, (0.5, 0.5))), seed)

    def rows(self, mixed, indices):
        return [tuple(mixed[i]["row"].tolist()) for i in indices]

    def test_rows_are_a_function_of_seed_and_index(self):
        order = np.random.default_rng(0).permutation(80).tolist()
        got = dict(zip(order, self.rows(self.make(), order), strict=True))
        want = self.rows(self.make(), range(80))
        self.assertEqual([got[i] for i in range(80)], want)
        self.assertNotEqual(self.rows(self.make(seed=1), range(80)), want)

    def test_seeds_beyond_32_bits_count_by_their_lower_ones(self):
        for seed in (2**32, 2**32 + 5, 3**31):
            got = self.rows(self.make(seed=seed), range(20))
            self.assertEqual(got, self.rows(self.make(seed=seed % 2**32), range(20)))

    def test_every_epoch_of_a_source_has_each_row_once(self):
        seen = self.rows(self.make(), range(40))
        second = [row for source, row in seen if source == 1]
        epochs = [second[i : i + 4] for i in range(0, 20, 4)]
        for epoch in epochs:
            self.assertEqual(sorted(epoch), [0, 1, 2, 3])
        self.assertGreater(len({tuple(epoch) for epoch in epochs}), 1)
        self.assertEqual(collections.Counter(s for s, _ in seen), {0: 20, 1: 20})

    def test_epochs(self):
        self.assertEqual(self.make().epochs(20), {"0": 1.0, "1": 2.5})
        self.assertEqual(self.make().epochs(0), {"0": 0.0, "1": 0.0})

    def test_a_mixture_of_one_has_the_order_of_the_source_alone(self):
        one = mixture.only(Numbered(0, 10), seed=3)
        two = mixture.Mixture(
            {"a": Numbered(0, 10), "b": Numbered(0, 10)},
            schedule((0, (1.0, 0.0))),
            seed=3,
        )
        self.assertEqual(self.rows(one, range(30)), self.rows(two, range(30)))


if __name__ == "__main__":
    environment.main()
