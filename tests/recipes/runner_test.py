"""The recipe `tiny`: every stage, a kill in the middle of one, the report."""

import contextlib
import dataclasses
import json
import pathlib
from unittest import mock
from xml.etree import ElementTree

import PIL.Image
import pytest
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.recipes import catalogue, record, runner
from glm5_jax.training.reporting import metrics, plot
from glm5_jax.training.run import state
from tests import environment, runs

KILLED_IN, KILLED_AT = "2_mid_training_80", 2


class Killed(BaseException):
    """Nothing catches it."""


def drawing(metrics_path, out_png):
    PIL.Image.new("RGB", (4, 4)).save(out_png)


def dying(run, values=None, save=state.Run.save):
    if run.workdir.name == KILLED_IN and run.step == KILLED_AT:
        # A killed process writes nothing more; a thread of this one would.
        run.checkpoints.close()
        raise Killed
    save(run, values)


def quick(stage):
    """Returns a stage whose optimizer compiles faster than the recipe's."""
    optim = dataclasses.replace(stage.train.optim, name="adamw")
    return dataclasses.replace(
        stage, train=dataclasses.replace(stage.train, optim=optim)
    )


class PipelineTest(runs.OneDeviceTest):
    """Two starts of one pipeline, the first of which is killed; two stages are one's.

    All stages together are slow: each compiles a step, an evaluation and an engine.
    """

    num_stages = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        tiny = catalogue.find("tiny")
        stages = [quick(stage) for stage in tiny.stages[: cls.num_stages]]
        names = [stage.name for stage in stages]
        [*first, last] = stages
        measures = (dataclasses.replace(m, lengths=(96,)) for m in last.measures)
        last = dataclasses.replace(last, measures=tuple(measures))
        cls.recipe = dataclasses.replace(
            tiny,
            # What one stage is measured by suffices.
            stages=(*(dataclasses.replace(s, measures=()) for s in first), last),
            claims=tuple(c for c in tiny.claims if {c.before, c.after} <= {*names}),
        )
        cls.workdir = cls.root / "tiny"
        draw = mock.patch.object(plot, "plot_losses", drawing)
        cls.enterClassContext(draw)
        # A stage that is started twice compiles once.
        cls.enterClassContext(runs.share_programs())
        dies = mock.patch.object(state.Run, "save", dying)
        with dies, contextlib.suppress(Killed):
            runner.run(cls.recipe, cls.workdir)
        cls.before = {p.parent.name: p.stat().st_mtime_ns for p in cls.summaries()}
        cls.result = runner.run(cls.recipe, cls.workdir)

    @classmethod
    def summaries(cls):
        return sorted(cls.workdir.glob("*/summary.json"))

    def test_finished_stages_are_kept_and_the_killed_one_resumes(self):
        self.assertEqual([*self.before], ["1_pretraining"])
        after = {p.parent.name: p.stat().st_mtime_ns for p in self.summaries()}
        self.assertLen(after, len(self.recipe.stages))
        self.assertContainsSubset(self.before.items(), after.items())
        lines = metrics.read(self.workdir / KILLED_IN / "metrics.jsonl")
        self.assertEqual([line["step"] for line in lines], [1, 2])
        self.assertGreater(lines[-1]["goodput/restore_seconds"], 0)

    def test_each_stage_starts_from_the_one_before(self):
        folders = self.recipe.folders(self.workdir)
        configs = [json.loads((f / "config.json").read_text()) for f in folders]
        starts = [config["init_from"] for config in configs]
        self.assertEqual(starts, [None, *map(str, folders[:-1])])
        self.assertEqual(configs[1]["init_from_changes"], ["rope_theta"])

    def test_the_html_is_one_well_formed_file(self):
        text = pathlib.Path(self.result["report"]).read_text()
        tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
        images = [image.get("src") for image in tree.iter("img")]
        self.assertLen(images, 1 + len(self.recipe.stages))
        self.assertTrue(all(i.startswith("data:image/png;base64,") for i in images))
        words = "".join(tree.itertext())
        for stage in self.recipe.stages:
            self.assertIn(stage.name, words)
        self.assertIn("--recipe=tiny --seed=0", words)

    def test_the_markdown_has_a_row_for_every_stage_and_claim(self):
        text = (self.workdir / "report.md").read_text()
        for stage in self.recipe.stages:
            self.assertRegex(text, rf"(?m)^\| {stage.name} \| 2 \| \d+ \|")
        self.assertEqual(
            self.result["claims"], len(self.recipe.stages) + len(self.recipe.claims)
        )
        for claim in self.recipe.claims:
            figures = r"\| [\d.-]+ \| [\d.-]+ \| (yes|no|not measured) \|"
            self.assertRegex(text, rf"\| {claim.text} {figures}")

    def test_a_finished_pipeline_only_writes_its_report_again(self):
        before = (self.workdir / "report.md").read_bytes()
        self.assertEqual(runner.run(self.recipe, self.workdir), self.result)
        self.assertEqual((self.workdir / "report.md").read_bytes(), before)

    def test_the_folder_of_another_pipeline_is_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "seed=0 there, seed=1 here"):
            runner.run(self.recipe, self.workdir, seed=1)
        with self.assertRaisesRegex(config_lib.InputError, "holds no pipeline"):
            runner.run(self.recipe, self.workdir / KILLED_IN)


@pytest.mark.slow
class WholeRecipeTest(PipelineTest):
    """The same with all stages."""

    num_stages = None


class RecordTest(absltest.TestCase):
    def test_an_unknown_recipe_gets_a_suggestion(self):
        with self.assertRaisesRegex(config_lib.InputError, "Did you mean small?"):
            catalogue.find("smal")

    def test_names_must_be_distinct_and_known(self):
        recipe = catalogue.find("tiny")
        stage = recipe.stages[0]
        claim = dataclasses.replace(recipe.claims[0], before="dense")
        with self.assertRaises(config_lib.InputError) as caught:
            dataclasses.replace(
                recipe, stages=(stage, stage), corpora=(), claims=(claim,)
            )
        for message in ("got twice: ['pretraining']", "text_64", "got ['dense'"):
            self.assertIn(message, str(caught.exception))

    def test_claims_compare(self):
        claim = record.Claim(
            text="", figure="", before="", after="", relation="is no higher than"
        )
        near = dataclasses.replace(claim, tolerance=0.01)
        above = dataclasses.replace(near, relation="is no lower than")
        self.assertTrue(above.holds(2.0, 1.99))
        self.assertFalse(above.holds(2.0, 1.97))
        self.assertFalse(claim.holds(2.0, 2.01))
        self.assertTrue(near.holds(2.0, 2.01))
        self.assertFalse(near.holds(2.0, 2.03))
        self.assertTrue(dataclasses.replace(claim, relation="rises").holds(0.1, 0.2))
        self.assertTrue(dataclasses.replace(claim, relation="falls").holds(0.2, 0.1))

    def test_the_plan_writes_nothing(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "new"
        lines = runner.plan(catalogue.find("small"), folder).splitlines()
        self.assertLen(lines, 3 + len(catalogue.find("small").stages))
        self.assertFalse(folder.exists())


if __name__ == "__main__":
    environment.main()
