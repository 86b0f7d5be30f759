"""compare: settings that differ, figures at common steps, curves, refusals."""

import json
import pathlib
import subprocess
import sys
from unittest import mock

import matplotlib.figure
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.training.reporting import records
from glm5_jax.training.reporting.comparison import figures, picture, runs, text
from tests import environment

ROOT = pathlib.Path(__file__).parents[2]
# Run as the command is, and fail if it has imported jax.
COMMAND = """
import runpy, sys
try:
    runpy.run_module("glm5_jax.compare", run_name="__main__", alter_sys=True)
finally:
    assert "jax" not in sys.modules
"""
TABLE = """\
setting             a      b
seed                0      1
num_steps           6      4
model.index_topk   64     16
data.tokenizer    bpe  bytes

Figures at step 4, the last that all have; differences are to a.

metric                          step          a          b  difference
eval/bits_per_byte                 4     2.2500     2.5000     +0.2500
  best                                2.2500 @4  2.4000 @2     +0.1500
train/lm_loss                      4     4.0000     4.0000           0
  best                             4     4.0000     4.0000           0
perf/tokens_per_second, median     4    3,002.5    1,500.0    -1,502.5
seconds                            4         24         28          +4
steps                                         6          4          -2"""


def line(step, **more):
    """A line of metrics.jsonl of a run that takes 1 s a step and 20 s to compile."""
    goodput = {"goodput/compile_seconds": 20, "goodput/step_seconds": step}
    return {"step": step, "train/lm_loss": 8.0 - step, **goodput} | more


class ComparisonTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.create_tempdir())

    def write(self, name, lines, config=(), summary=None):
        """Writes the folder of a run, and returns its path."""
        folder = self.root / name
        folder.mkdir(parents=True)
        tree = {"seed": 0, "num_steps": 6, "data": {}} | dict(config)
        (folder / "config.json").write_text(json.dumps(tree))
        if lines is not None:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / "metrics.jsonl").write_text(text)
        if summary:
            (folder / "summary.json").write_text(json.dumps(summary))
        return str(folder)

    def two(self):
        """A finished run of six steps, and one that has done four."""
        speed, held_out = "perf/tokens_per_second", "eval/bits_per_byte"
        a = [line(s, **{speed: 3000 + s}) for s in range(1, 7)]
        for i, bits in (1, 3.0), (3, 2.25), (5, 2.0):
            a[i][held_out] = bits
        b = [line(s, **{speed: 1500.0}) for s in range(1, 5)]
        b[1][held_out], b[3][held_out] = 2.4, 2.5
        b[3]["goodput/save_seconds"] = 4
        b[0][held_out] = None  # it was not finite
        model = {"seed": 1, "num_steps": 4, "model": {"index_topk": 16}}
        return [
            self.write(
                "a",
                a,
                {"model": {"index_topk": 64}, "data": {"tokenizer": "bpe"}},
                {"device": "1 CPU", "seconds": 3},
            ),
            self.write("b", b, model | {"data": {"tokenizer": "bytes"}}),
        ]

    def test_the_command_prints_the_tables_without_jax(self):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *self.two()],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        self.assertEqual(done.stdout, TABLE + "\n", done.stderr)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_json_has_the_same(self):
        found = runs.read(self.two())
        tree = json.loads(text.as_json(found, figures.choose(found, ())))
        self.assertEqual([run["name"] for run in tree["runs"]], ["a", "b"])
        self.assertEqual(tree["settings"]["model.index_topk"], [64, 16])
        self.assertEqual(tree["common_step"], 4)
        _, best, *_ = tree["figures"]
        self.assertEqual((best["metric"], best["kind"]), ("eval/bits_per_byte", "best"))
        self.assertEqual((best["values"], best["steps"]), ([2.25, 2.4], [4, 2]))
        self.assertAlmostEqual(best["differences"][1], 0.15)

    def test_a_resumed_run_counts_each_step_once(self):
        """It logged six steps, was killed, did four and five again and goes on."""
        again = [line(4, **{"train/lm_loss": 1.5}), line(5, **{"train/lm_loss": 3.5})]
        first = [line(step) for step in range(1, 7)]
        resumed = self.write("resumed", [*first, *again])
        found = runs.read([resumed, self.write("whole", first)])
        self.assertEqual([x["step"] for x in found[0].lines], [1, 2, 3, 4, 5])
        self.assertEqual(figures.common_step(found), 5)
        last, best, steps = figures.of(found, ["train/lm_loss"])
        self.assertEqual((last.values, last.steps), ((3.5, 3), (5, 5)))
        self.assertEqual((best.values, best.steps), ((1.5, 3), (4, 5)))
        self.assertEqual(steps.values, (5, 6))

    def test_a_step_that_goes_back_undoes_later_ones(self):
        lines = [{"step": s, "i": i} for i, s in enumerate((2, 4, 6, 4, 4, 6, 1, 3))]
        kept = [(x["step"], x["i"]) for x in records.once_a_step(lines)]
        self.assertEqual(kept, [(1, 6), (3, 7)])

    def test_without_a_common_step_nothing_is_subtracted(self):
        every_third = [line(3, **{"eval/success": 0.5}), line(6)]
        often = [line(s) for s in (1, 2, 3, 4)]
        often[-1]["eval/success"] = 0.75
        found = runs.read([self.write("a", every_third), self.write("b", often)])
        success, loss, *_ = figures.of(found, ["eval/success", "train/lm_loss"])
        self.assertEqual((success.values, success.steps), ((0.5, 0.75), (3, 4)))
        self.assertEqual(success.differences, (None, None))
        self.assertEqual((loss.values, loss.steps), ((5, 5), (3, 3)))
        page = text.text(found, ["eval/success"])
        self.assertRegex(page, r"eval/success +0\.5000 @3  0\.7500 @4\n")
        self.assertIn("at no common step, so not compared: eval/success.", page)
        apart = runs.read([self.write("c", [line(5)]), self.write("d", [line(4)])])
        self.assertIn("No step is common to all", text.text(apart, ["train/lm_loss"]))

    def test_a_metric_of_one_run_is_shown_if_it_is_named(self):
        first = self.write("a", [line(1), line(2)])
        more = self.write("b", [line(1), line(2, **{"train/grad_norm": 2e-5})])
        found = runs.read([first, more])
        self.assertNotIn("train/grad_norm", figures.choose(found, ()))
        page = text.text(found, figures.choose(found, ["train/grad_norm"]))
        self.assertRegex(page, r"(?m)^train/grad_norm +2 +- +2e-05$")
        self.assertNotIn("train/lm_loss", page)

    @parameterized.parameters(
        ("eval/bits_per_byte/docs", min),
        ("train/indexer_kl", min),
        ("eval/success/2_digits", max),
        ("eval/needle/256/accuracy", max),
        ("eval/success_low", None),
        ("optim/learning_rate", None),
    )
    def test_the_name_says_which_value_is_better(self, metric, best):
        self.assertIs(figures.better(metric), best)

    def test_three_runs_and_their_names(self):
        paths = [self.write(f"{x}/run", [line(1)], {"seed": x}) for x in (1, 2, 3)]
        found = runs.read(paths)
        self.assertEqual([run.name for run in found], ["1/run", "2/run", "3/run"])
        page = text.text(found, ["train/lm_loss"])
        head = r"(?m)^metric +step +1/run +2/run +difference +3/run +difference$"
        self.assertRegex(page, head)

    def test_a_field_that_an_earlier_version_lacked_had_its_default(self):
        default = config_lib.RLConfig().group_size
        old = self.write("old", [line(1)])
        new = self.write("new", [line(1)], {"rl": {"group_size": default}})
        found = runs.read([old, new])
        self.assertEmpty(figures.settings(found))
        self.assertStartsWith(text.text(found, ["seconds"]), "The configs are equal.")

    def test_what_they_ran_on_counts_where_all_have_ended(self):
        one = {"device": "1 x cpu", "jax": "0.10", "commit": "5f"}
        two = {"device": "8 x tpu", "commit": "6e"}
        ended = [
            self.write("a", [line(1)], (), one),
            self.write("b", [line(1)], (), two),
        ]
        found = figures.settings(runs.read(ended))
        self.assertEqual(found, ["device", "commit"])
        under_way = self.write("c", [line(1)], {"removed": 3})
        found = runs.read([*ended, under_way])
        self.assertRegex(text.text(found, ["seconds"]), r"(?m)^removed  -  -  3$")
        self.assertEqual(figures.settings(found), ["removed"])

    def test_each_folder_that_is_no_run_has_its_line(self):
        a, _ = self.two()
        empty = self.write("empty", [])
        missing = self.write("begun", None)
        given = [
            a,
            empty,
            missing,
            str(self.root),
            f"{self.root}/emty",
            a,
            "~nobody_here/a",
        ]
        with self.assertRaises(config_lib.InputError) as caught:
            runs.read(given)
        told = str(caught.exception).splitlines()
        self.assertLen(told, 6)
        self.assertStartsWith(told[0], f"{empty} has no metrics: ")
        self.assertStartsWith(told[1], f"{missing} has no metrics: ")
        self.assertRegex(told[2], "no config.json of one. In it are the runs a, b, emp")
        self.assertEndsWith(told[3], f"Did you mean {empty}?")
        self.assertEqual(told[4], f"{a} is given twice; give it once.")
        self.assertIn("~nobody_here/a is no folder", told[5])

    @parameterized.parameters(((),), (("a",),))
    def test_fewer_than_two_runs(self, given):
        message = f"two or more runs: .*; got {given[0] if given else 'nothing'}"
        with self.assertRaisesRegex(config_lib.InputError, message):
            runs.read(given)

    def test_a_metric_that_no_run_has(self):
        found = runs.read(self.two())
        with self.assertRaises(config_lib.InputError) as caught:
            figures.choose(found, ["loss", "seconds", "eval/bits_per_bite", "xyzzy"])
        self.assertEqual(
            str(caught.exception).splitlines(),
            [
                "no run has the metric 'loss'. Near it are train/lm_loss.",
                "no run has the metric 'eval/bits_per_bite'. Near it are "
                "eval/bits_per_byte.",
                "no run has the metric 'xyzzy'. metrics.jsonl has their names.",
            ],
        )

    def test_another_picture_than_png(self):
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *self.two(), "--plot=curves.gif"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        self.assertEqual(done.returncode, 2)
        self.assertIn("--plot must be a file FILE.png, got curves.gif", done.stderr)

    def test_the_picture_has_a_line_for_each_run(self):
        found, made = runs.read(self.two()), []
        figure = matplotlib.figure.Figure

        def remember(*args, **kwargs):
            made.append(figure(*args, **kwargs))
            return made[-1]

        with mock.patch.object(matplotlib.figure, "Figure", remember):
            picture.draw(
                found, figures.choose_curves(found, ()), self.root / "new" / "x.png"
            )
        self.assertEqual((self.root / "new" / "x.png").read_bytes()[:4], b"\x89PNG")
        loss, held_out = made[0].axes
        self.assertEqual(loss.get_title("left"), "train/lm_loss")
        self.assertEqual([*held_out.lines[1].get_xdata()], [2, 4, 6])
        labels = [label.get_text() for label in held_out.get_legend().get_texts()]
        self.assertEqual(labels, ["a", "b"])


if __name__ == "__main__":
    environment.main()
