"""Checks which steps a rule deletes, and that a manager follows the rule."""

import math

from absl.testing import parameterized

from glm5_jax.checkpoint import retention
from tests import environment
from tests.checkpoint import steps

BITS = "eval/bits_per_byte"
METRICS = {10: 3.0, 20: 1.0, 30: 2.0, 40: math.nan, 50: 1.0, 60: 5.0}


def found(unsafe=(), metrics=METRICS):
    return [
        retention.Step(n, n not in unsafe, {BITS: metrics[n]} if n in metrics else {})
        for n in (10, 20, 30, 40, 50, 60)
    ]


class RuleTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("newest", {"newest": 2}, (), [10, 20, 30, 40]),
        ("more_than_there_are", {"newest": 7}, (), []),
        ("every", {"newest": 1, "every": 20}, (), [10, 30, 50]),
        ("best", {"newest": 1, "best": 1}, (), [10, 20, 30, 40]),
        ("best_two", {"newest": 1, "best": 2}, (), [10, 30, 40]),
        (
            "highest",
            {"newest": 1, "best": 2, "is_lower_better": False},
            (),
            [20, 30, 40, 50],
        ),
        (
            "other_metric",
            {"newest": 1, "best": 2, "metric": "x"},
            (),
            [10, 20, 30, 40, 50],
        ),
        ("unproven_newest", {"newest": 2}, (50, 60), [10, 20]),
        ("unproven_are_not_best", {"newest": 1, "best": 1}, (50,), [10, 30, 40, 50]),
        ("as_many_as_are_proven", {"newest": 4}, (10, 20), [10, 20]),
        ("none_proven", {"newest": 1}, (10, 20, 30, 40, 50, 60), []),
    )
    def test_goes(self, rule, unsafe, want):
        got = retention.Retention(**rule).to_delete(found(unsafe))
        self.assertEqual(got, want)

    def test_a_metric_that_is_not_a_number_is_ignored(self):
        rule = retention.Retention(newest=1, best=1)
        named = found(metrics={10: "good", 20: None, 30: 1.0})
        self.assertEqual(rule.to_delete(named), [10, 20, 40, 50])

    def test_a_run_of_an_earlier_version_keeps_the_newest_alone(self):
        rule = retention.of_run({"checkpoints_to_keep": 4})
        self.assertEqual(rule, retention.Retention(newest=4))


class ManagerTest(steps.StepsTestCase):
    def test_newest_every_and_best_stay(self):
        rule = retention.Retention(newest=1, every=3, best=1)
        manager = self.open(rule)
        for step, bits in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0), (5, 2.0)):
            metadata = {"metrics": {BITS: bits}}
            manager.save(step, steps.make_state(step), metadata)
        manager.wait()
        self.assertEqual(self.names(), ["2", "3", "5"])


if __name__ == "__main__":
    environment.main()
