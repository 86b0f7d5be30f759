"""Whole studies at a tiny size: what runs, what is skipped, what the report says."""

import dataclasses
import json
import pathlib
import sys
from unittest import mock

from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.ablations import measures, report, results, runner, searches, study
from glm5_jax.training import loop
from glm5_jax.training.run import folder as run_folder
from tests import environment, runs, small_configs

BITS = study.Metric(
    label="held-out",
    key="eval/bits_per_byte",
    unit="bits per byte",
    better="lower",
    plot="curve",
)
STEPS = study.Metric(label="last step", key="own/step", unit="steps", digits=0)


def measure(checkpoint):
    """Figures of a checkpoint, which must be there."""
    assert checkpoint.path.is_dir()
    return {"own/step": checkpoint.step, **dict(checkpoint.overrides)}


class Search:
    """Finds a field on its second start; the first is killed after it wrote a file."""

    name = "a field"

    def __init__(self):
        self.calls = []

    def __call__(self, checkpoint, path):
        self.calls.append(checkpoint)
        if not path.exists():
            path.write_text("a round")
            raise KeyboardInterrupt
        assert path.read_text() == "a round"
        return {"model.index_topk": 4}


class StudyTest(runs.OneDeviceTest):
    """Two arms of two seeds; the second starts from the first one's parameters."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_corpus(cls.root / "corpus")
        base = small_configs.text_run(
            cls.root / "corpus",
            cls.root / "cache",
            num_steps=2,
            model=small_configs.DENSE_MODEL,
            eval_every=0,
            sample_tokens=0,
            checkpoint_every=1,
        )
        cls.enterClassContext(runs.compile_once(base))
        cls.study = study.Study(
            question="Do more steps help?",
            base=base,
            arms=(
                study.Arm(name="first"),
                study.Arm(
                    name="Then more",
                    changes={"num_steps": 3},
                    after="first",
                    measured_with={"model.index_topk": 4},
                ),
            ),
            metrics=(BITS, STEPS),
            measure=measure,
            claims=(study.Claim(better="Then more", worse="first", source="nobody"),),
            paper={"first": {"theirs": "1.0"}},
        )
        cls.plan = runner.Plan(study=cls.study, workdir=cls.root / "study", num_seeds=2)
        runner.check(cls.plan)
        runner.run_all(cls.plan, 1, [])

    def test_every_arm_has_every_seed(self):
        names = [job.name for job in self.plan.jobs()]
        self.assertEqual(
            names,
            ["first/seed_0", "then_more/seed_0", "first/seed_1", "then_more/seed_1"],
        )
        folders = [self.plan.workdir / name for name in names]
        configs = [json.loads((f / "config.json").read_text()) for f in folders]
        self.assertEqual([c["seed"] for c in configs], [0, 0, 1, 1])
        self.assertIsNone(configs[2]["init_from"])
        self.assertEqual(configs[3]["init_from"], str(folders[2]))

    def test_a_second_start_runs_nothing(self):
        with mock.patch.object(loop, "train") as train:
            runner.check(self.plan)
            runner.run_all(self.plan, 1, [])
        train.assert_not_called()

    def test_only_what_was_not_measured_runs_again(self):
        job = self.plan.jobs()[-1]
        measured = job.folder / results.MEASURED
        before = measured.read_bytes()
        measured.unlink()
        with mock.patch.object(loop, "train", wraps=loop.train) as train:
            runner.run_all(self.plan, 1, [])
        train.assert_called_once_with(job.config, job.folder)  # finds itself done
        self.assertEqual(measured.read_bytes(), before)

    def test_seeds_vary_the_order_of_the_data_and_the_parameters(self):
        first, other = (results.records(self.plan.jobs()[i].folder) for i in (0, 2))
        self.assertNotEqual(first[0]["train/lm_loss"], other[0]["train/lm_loss"])

    def test_a_search_runs_once_for_arms_that_train_and_that_do_not(self):
        search = Search()
        arms = (
            study.Arm(name="first"),
            study.Arm(name="untrained", after="first", is_trained=False, search=search),
            study.Arm(name="searched", after="first", search=search),
        )
        made = dataclasses.replace(self.study, arms=arms, claims=())
        plan = dataclasses.replace(self.plan, study=made, num_seeds=1)
        first, untrained, searched = plan.jobs()
        elsewhere = dataclasses.replace(plan, workdir=self.root / "elsewhere")
        with self.assertRaisesRegex(config_lib.InputError, "'first', which has none"):
            runner.run(elsewhere, elsewhere.jobs()[1])
        with mock.patch.object(loop, "train", wraps=loop.train) as train:
            with self.assertRaises(KeyboardInterrupt):
                runner.run_all(plan, 1, [])
            self.assertFalse(untrained.is_done)
            runner.run_all(plan, 1, [])
        last = study.Checkpoint(first.folder, 2, ())
        self.assertEqual(search.calls, [last, last])
        [[config, folder]] = [call.args for call in train.call_args_list]
        self.assertEqual(folder, searched.folder)
        self.assertEqual(config.model.index_topk, 4)
        self.assertEqual(config.init_from, str(first.folder))
        [line] = results.records(untrained.folder)
        self.assertEqual(line, {"step": 2, "own/step": 2, "model.index_topk": "4"})
        self.assertNotIn("model.index_topk", results.records(searched.folder)[-1])
        text = report.write(plan, "searched", "python -m x").read_text()
        self.assertIn("These 2 runs took", text)
        runner.check(plan)
        runner.run_all(plan, 1, [])
        self.assertLen(search.calls, 2)

    def test_an_unknown_suite_is_refused_before_anything_runs(self):
        suites = measures.Suites(names=("needel",), length=64)
        search = searches.Windows(num_windows=1, length=64, suite="needel")
        [first, second] = self.study.arms
        searched = dataclasses.replace(second, search=search)
        for made in (
            dataclasses.replace(self.study, measure=suites),
            dataclasses.replace(self.study, arms=(first, searched)),
        ):
            plan = dataclasses.replace(self.plan, study=made)
            with self.assertRaisesRegex(config_lib.InputError, "needel.*needle"):
                runner.check(plan)

    def test_an_override_that_does_not_reach_all_arms_is_refused(self):
        swept = dataclasses.replace(self.study, rates=(0.1, 0.01))
        for made, path, own in (
            (self.study, "num_steps", "arm 'Then more'"),
            (self.study, "seed", "each run"),
            (swept, "optim.learning_rate", "each rate of the sweep"),
        ):
            given = {"study": made, "overrides": (("loss.z_weight", "0"), (path, "4"))}
            plan = dataclasses.replace(self.plan, **given)
            with self.assertRaisesRegex(
                config_lib.InputError, f"^--config.{path} does not reach.*: {own} has"
            ):
                runner.check(plan)

    def test_an_edited_study_is_refused(self):
        edited = dataclasses.replace(self.plan, overrides=(("loss.z_weight", "0.1"),))
        with self.assertRaisesRegex(config_lib.InputError, "loss.z_weight: 0.0 there"):
            runner.check(edited)

    def test_the_report(self):
        page = report.write(self.plan, "more", "python -m x")
        text = page.read_text()
        head, _, first, second = [x for x in text.splitlines() if x.startswith("|")]
        self.assertIn("| held-out, bits per byte | held-out: difference |", head)
        self.assertIn("paper: theirs", head)
        self.assertRegex(first, r"^\| first \| 2 \| .* \| baseline \| .* \| 1.0 \|$")
        self.assertRegex(second, r"^\| Then more \| 2 \|")
        self.assertGreater(page.with_suffix(".png").stat().st_size, 5000)
        tree = json.loads(page.with_suffix(".json").read_text())
        more = tree["arms"]["Then more"]
        [*_, last] = results.records(self.plan.jobs()[-1].folder)
        self.assertEqual(last["model.index_topk"], "4")
        self.assertEqual(more["last step"]["values"], {"0": 3.0, "1": 3.0})
        bits = [tree["arms"][name]["held-out"] for name in ("first", "Then more")]
        gaps = [bits[1]["values"][s] - bits[0]["values"][s] for s in "01"]
        self.assertAlmostEqual(more["held-out"]["difference"]["mean"], sum(gaps) / 2)
        [claim] = tree["claims"]
        self.assertIn(claim["verdict"], ("holds", "not separated"))
        self.assertIn(f"(nobody): {claim['verdict']}", text)


class SweepTest(absltest.TestCase):
    """Rates are swept on the first seed alone, and the best is taken."""

    def test_the_best_rate_of_an_arm_is_taken(self):
        root = pathlib.Path(self.create_tempdir().full_path)
        swept = study.Study(
            question="?",
            base=small_configs.text_run("python", "", num_steps=2),
            arms=(study.Arm(name="one"), study.Arm(name="two")),
            metrics=(BITS,),
            rates=(0.1, 0.01),
        )
        plan = runner.Plan(study=swept, workdir=root, num_seeds=2)

        def train(config, folder):
            """Leaves what a run does; the second arm is best at the lower rate."""
            is_two, rate = folder.parent.name.startswith("two"), config.optim
            bits = abs(rate.learning_rate - (0.01 if is_two else 0.1))
            self.assertAlmostEqual(rate.end_learning_rate, rate.learning_rate / 10)
            folder.mkdir(parents=True)
            line = {"step": 2, "eval/bits_per_byte": bits}
            (folder / "metrics.jsonl").write_text(json.dumps(line))
            (folder / "summary.json").write_text('{"steps": 2}')

        with mock.patch.object(loop, "train", side_effect=train) as calls:
            runner.run_all(plan, 1, [])
        self.assertEqual(calls.call_count, 2 * 2 + 2)
        rates = {r.arm.name: r.rate for r in report.collect(plan)}
        of_steps = {r.tokens_per_step for r in report.collect(plan)}
        data = plan.jobs()[0].config.data
        self.assertEqual(of_steps, {data.batch_size * data.sequence_length})
        self.assertEqual(rates, {"one": 0.1, "two": 0.01})
        self.assertEqual([r.seeds for r in report.collect(plan)], [(0, 1), (0, 1)])
        text = report.write(plan, "swept", "python -m x").read_text()
        self.assertIn("\n| one | 0.01 | 0.090 |\n| two | 0.1 | 0.090 |\n", text)


# A child that leaves what a run does; it fails for the arm "bad".
CHILD = """
import pathlib, sys
root, only = sys.argv[1], sys.argv[-1].removeprefix("--only=")
if only.startswith("bad"):
    sys.exit("a message")
folder = pathlib.Path(root, only)
folder.mkdir(parents=True)
(folder / "measured.jsonl").write_text("")
(folder / "summary.json").write_text('{"steps": 2}')
with open(pathlib.Path(root, "order"), "a") as file:
    file.write(only + "\\n")
"""


class ChildrenTest(absltest.TestCase):
    """Runs at a time are processes; here small ones, without jax."""

    def run_arms(self, *arms, **changes):
        root = self.create_tempdir().full_path
        made = study.Study(
            question="?",
            base=small_configs.text_run("python", "", num_steps=2, **changes),
            arms=arms,
            metrics=(BITS,),
        )
        plan = runner.Plan(study=made, workdir=pathlib.Path(root), num_seeds=2)
        runner.run_all(plan, 3, [sys.executable, "-c", CHILD, root])
        return (plan.workdir / "order").read_text().split()

    def test_an_arm_waits_for_the_one_that_it_starts_from(self):
        order = self.run_arms(study.Arm(name="a"), study.Arm(name="b", after="a"))
        self.assertCountEqual(order, [f"{a}/seed_{s}" for a in "ab" for s in (0, 1)])
        for seed in ("seed_0", "seed_1"):
            self.assertLess(order.index(f"a/{seed}"), order.index(f"b/{seed}"))

    def test_a_study_that_begins_from_a_model_does_not_wait_for_it(self):
        folder = self.create_tempdir().full_path  # of Hugging Face: no summary.json
        arms = study.Arm(name="a"), study.Arm(name="b", after="a")
        self.assertLen(self.run_arms(*arms, init_from=folder), 4)

    def test_a_finished_arm_from_which_others_began_is_not_trained_on(self):
        root = pathlib.Path(self.create_tempdir().full_path)
        search = Search()
        made = study.Study(
            question="?",
            base=small_configs.text_run("python", "", num_steps=2),
            arms=(
                study.Arm(name="a"),
                study.Arm(name="b", after="a", is_trained=False),
                study.Arm(name="c", after="a", search=search),
            ),
            metrics=(BITS,),
        )
        plan = runner.Plan(study=made, workdir=root, num_seeds=2)
        longer = dataclasses.replace(plan, overrides=(("num_steps", "4"),))
        [first] = [job for job in plan.jobs() if job.name == "a/seed_1"]
        run_folder.claim(first.folder, first.config)
        (first.folder / "summary.json").write_text('{"steps": 2}')
        runner.check(longer)
        for folder in (
            root / "b" / "seed_1",
            root / "c" / "seed_1",
            plan.search_folder(made.arms[2], 1),
        ):
            folder.mkdir(parents=True)
            runner.check(plan)
            with self.assertRaisesRegex(
                config_lib.InputError, f"ended at step 2 .* 4.*{folder}.*--workdir"
            ):
                runner.check(longer)
            folder.rmdir()
        runner.check(longer)

    def test_a_child_that_fails_ends_the_study(self):
        with self.assertRaisesRegex(RuntimeError, "arm 'bad'(.|\n)*a message"):
            self.run_arms(study.Arm(name="bad"))


if __name__ == "__main__":
    environment.main()
