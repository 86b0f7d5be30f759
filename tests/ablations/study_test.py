"""Studies as records: wrong ones are refused, and all that come with it can be made."""

import pathlib

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.ablations import (
    measures,
    results,
    runner,
    scales,
    searches,
    study,
)
from glm5_jax.evals import catalogue
from tests import environment

OWN = """
from glm5_jax.ablations import scales
from glm5_jax.ablations.study import Arm, Metric, Study


def get_study(scale):
    return Study(
        question="Does weight decay help?",
        base=scales.pretrain(scale),
        arms=(Arm(name="0.1"), Arm(name="0", changes={"optim.weight_decay": 0.0})),
        metrics=(Metric(label="loss", key="train/lm_loss", unit="nats"),),
    )
"""
SEARCH = searches.Windows(num_windows=1, length=8)
BITS = study.Metric(label="bits", key="b", unit="bits", better="lower")
SUCCESS = study.Metric(label="success", key="s", unit="share", better="higher")


def make(**changes):
    given = {
        "question": "?",
        "base": scales.pretrain("tiny"),
        "arms": (study.Arm(name="a"), study.Arm(name="b", after="a")),
        "metrics": (BITS, SUCCESS),
    }
    return study.Study(**(given | changes))


class StudyTest(parameterized.TestCase):
    @parameterized.product(name=study.names(), scale=study.SCALES)
    def test_those_that_come_with_it(self, name, scale):
        """Every arm has a config that holds, at every scale."""
        found = study.load(name, scale)
        plan = runner.Plan(study=found, workdir=pathlib.Path("w"), num_seeds=2)
        for arm in found.arms:
            found.config(arm, {}, ())
        self.assertNotEmpty(plan.jobs())
        if isinstance(found.measure, measures.Suites):
            self.assertContainsSubset(found.measure.names, catalogue.SUITES)
        lines = (study.STUDIES / f"{name}.py").read_text().count("\n")
        self.assertLessEqual(lines, 100)

    def test_an_own_file(self):
        path = self.create_tempfile("own.py", OWN).full_path
        found = study.load(path, "tiny")
        self.assertEqual(found.reference.name, "0.1")
        self.assertEqual(found.config(found.arms[1], {}, ()).optim.weight_decay, 0)

    @parameterized.parameters(
        ("topc", "tiny", "Did you mean topk"),
        ("topk", "tinny", "Did you mean tiny"),
        ("absent.py", "tiny", "there is no file absent.py"),
    )
    def test_unknown_names(self, name, scale, message):
        with self.assertRaisesRegex(config.InputError, message):
            study.load(name, scale)

    @parameterized.parameters(
        ("x = 1", "define get_study"),
        ("def get_study(scale):\n    return 1", "must return a Study, got int"),
        ("def get_study(scale):\n    return 1 / 0", r"ZeroDivisionError.*\(line 2\)"),
    )
    def test_wrong_files(self, text, message):
        path = self.create_tempfile("own.py", text).full_path
        with self.assertRaisesRegex(config.InputError, message):
            study.load(path, "tiny")

    @parameterized.parameters(
        ({"baseline": "c"}, "baseline names 'c', which is none of a, b"),
        ({"arms": (study.Arm(name="a", after="b"),)}, "after names 'b'"),
        ({"arms": (study.Arm(name="a"), study.Arm(name="A"))}, "share a name"),
        ({"paper": {"c": {}}}, "paper names 'c'"),
        ({"arms": (study.Arm(name="a", is_trained=False),)}, "'a' needs `after`"),
        ({"arms": (study.Arm(name="a", search=SEARCH),)}, "'a' needs `after`"),
        (
            {
                "arms": (
                    study.Arm(name="a"),
                    study.Arm(name="b", after="a", is_trained=False),
                    study.Arm(name="c", after="b"),
                )
            },
            "'c': after names 'b', which is none of a",
        ),
        (
            {
                "arms": (
                    study.Arm(name="a"),
                    study.Arm(
                        name="b", after="a", is_trained=False, changes={"seed": 1}
                    ),
                )
            },
            "'b' trains nothing, so its changes have no effect",
        ),
    )
    def test_wrong_records(self, changes, message):
        with self.assertRaisesRegex(config.InputError, message):
            make(**changes)

    def test_a_wrong_change_names_the_arm(self):
        made = make(arms=(study.Arm(name="a", changes={"model.index_topp": 3}),))
        with self.assertRaisesRegex(config.InputError, "arm 'a'.*index_topk"):
            made.config(made.arms[0], {}, ())


def result(name, **values):
    """An arm whose seeds have these values, a tuple a key."""
    lines = [
        [{"step": 1, **dict(zip(values, row, strict=True))}]
        for row in zip(*values.values(), strict=True)
    ]
    seeds = tuple(range(len(lines)))
    return results.Result(study.Arm(name=name), seeds, tuple(lines), 8, 0.1)


class ResultsTest(parameterized.TestCase):
    def test_values_of_a_curve(self):
        lines = [{"step": i, "x": 10.0 - i} for i in range(8)]
        lines.append({"step": 8, "x": None})
        for kind, want in (("last", 3), ("max", 10), ("late", 3.5)):
            metric = study.Metric(label="x", key="x", unit="", value=kind)
            self.assertEqual(results.value(lines, metric), want)
        absent = study.Metric(label="y", key="y", unit="")
        self.assertIsNone(results.value(lines, absent))

    @parameterized.parameters(
        ((1.0, 1.1, 1.2), (2.0, 2.1, 2.3), "holds"),
        ((2.0, 2.1, 2.3), (1.0, 1.1, 1.2), "reversed"),
        ((1.0, 2.0, 3.0), (2.0, 1.0, 3.1), "not separated"),
    )
    def test_verdicts_follow_the_intervals(self, a, b, want):
        """By a metric of which less is better, and by one of which more is."""
        claims = (
            study.Claim(better="a", worse="b", source="s"),
            study.Claim(better="b", worse="a", source="s", label="success"),
        )
        found = [result("a", b=a, s=a), result("b", b=b, s=b)]
        verdicts = results.verdicts(make(claims=claims), found)
        self.assertEqual([v.word for v in verdicts], [want, want])
        self.assertEqual(verdicts[0].advantage, verdicts[1].advantage)
        [missing, _] = results.verdicts(make(claims=claims), found[:1])
        self.assertEqual(missing.word, "not measured")


if __name__ == "__main__":
    environment.main()
