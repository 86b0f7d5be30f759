"""The parts of the grid: which versions sample, what is skipped, and the table."""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from tests import environment

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import staleness_grid
import staleness_report

SETTINGS = staleness_grid.Settings(steps=10, learning_rate=1e-3)


def make_record(seed, staleness, objective, success, masked=0.0):
    return {
        **dataclasses.asdict(staleness_grid.Cell(seed, staleness, objective)),
        "settings": dataclasses.asdict(SETTINGS),
        "start": 0.4,
        "success": success,
        "rewards": [0.4] * staleness + [0.4, 0.5, 0.6, 0.7, 0.8, 0.9 + seed],
        "masked": masked,
        "gap": 0.25,
        "grad_norm_max": 2.0 + seed,
    }


class VersionsTest(parameterized.TestCase):
    @parameterized.parameters(0, 1, 3)
    def test_the_oldest_is_as_many_versions_behind_as_asked(self, staleness):
        versions, params = staleness_grid.Versions(staleness), np.zeros(2, np.float32)
        for position in range(6):
            versions.add({"w": params + position}, position)
            found, version = versions.oldest
            self.assertEqual(version, max(position - staleness, 0))
            np.testing.assert_array_equal(found["w"], np.full(2, version))

    def test_a_token_of_another_age_ends_the_run(self):
        mask = np.array([[0, 1, 1]])
        batch = {"loss_mask": mask, "staleness": np.array([[0, 2, 2]])}
        staleness_grid.require_age(batch, 2)
        with self.assertRaisesRegex(RuntimeError, "2 versions old"):
            staleness_grid.require_age(batch | {"staleness": mask}, 2)
        with self.assertRaisesRegex(RuntimeError, "1 versions old"):
            staleness_grid.require_age(batch | {"staleness": 1 + mask}, 1)
        with self.assertRaisesRegex(RuntimeError, "2 versions old"):
            mixed = np.array([[0, 1, 2]])
            staleness_grid.require_age(batch | {"staleness": mixed}, 2)
        staleness_grid.require_age(batch | {"loss_mask": 0 * mask}, 1)


class RecordsTest(absltest.TestCase):
    def test_all_cells_of_a_seed_come_before_the_next(self):
        args = argparse.Namespace(
            seeds=[3, 1],
            staleness=[0, 8],
            objectives=["none", "dis"],
            zero_once=False,
        )
        found = [dataclasses.astuple(cell) for cell in staleness_grid.cells(args)]
        a_seed = [(0, "none"), (0, "dis"), (8, "none"), (8, "dis")]
        self.assertEqual(found, [(s, *cell) for s in (3, 1) for cell in a_seed])
        args.zero_once = True
        found = [dataclasses.astuple(cell) for cell in staleness_grid.cells(args)]
        del a_seed[1]
        self.assertEqual(found, [(s, *cell) for s in (3, 1) for cell in a_seed])

    def test_a_line_that_a_kill_cut_is_dropped_for_good(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "results.jsonl"
            self.assertEqual(staleness_grid.read(path), [])
            record = make_record(0, 2, "tis", 0.5)
            path.write_text(f'{json.dumps(record)}\n{{"seed": 1')
            for _ in range(2):
                (found,) = staleness_grid.read(path)
                self.assertEqual((found["seed"], found["success"]), (0, 0.5))
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self.assertLen(staleness_grid.read(path), 2)

    def test_means_are_over_tokens_not_steps(self):
        seen = [
            {"reward": 0.5, "tokens": 30, "masked": 0.2, "grad_norm": 1, "gap": 0.3},
            {"reward": 0.7, "tokens": 0, "masked": 0.0, "grad_norm": 0, "gap": 0.0},
            {"reward": 0.6, "tokens": 10, "masked": 0.6, "grad_norm": 4, "gap": 0.7},
        ]
        found = staleness_grid.summary(seen)
        self.assertAlmostEqual(found["masked"], 12 / 40)
        self.assertAlmostEqual(found["gap"], 16 / 40)
        self.assertEqual(found["grad_norm_max"], 4)
        self.assertEqual(found["idle_steps"], 1)
        self.assertEqual(found["rewards"], [0.5, 0.7, 0.6])


class ReportTest(absltest.TestCase):
    records = (
        make_record(0, 0, "none", 0.5),
        make_record(1, 0, "none", 0.6),
        make_record(0, 2, "dis", 0.9, masked=0.125),
    )

    def test_student_interval_of_two_seeds(self):
        lines = staleness_report.table(self.records).splitlines()
        # Student's quantile of one degree is 12.7, the standard error is 5%.
        self.assertIn("| 0 | none | 2 | 40% | 55.0% | 0.0% to 100.0% |", lines[2])
        self.assertIn("| 50.0% to 60.0% | 0.00% | 0.25 | 3 |", lines[2])
        self.assertIn("| 2 | dis | 1 | 40% | 90.0% |  |", lines[3])
        self.assertIn("| 12.50% |", lines[3])
        self.assertLen(lines, 4)

    def test_the_interval_of_three(self):
        records = [make_record(i, 4, "tis", s) for i, s in enumerate((0.8, 0.82, 0.84))]
        # Student's quantile of two degrees is 4.303, the standard error is 1.155%.
        line = staleness_report.table(records).splitlines()[2]
        self.assertIn("| 82.0% | 77.0% to 87.0% |", line)

    def test_the_picture_has_a_place_for_each_staleness(self):
        figure = staleness_report.draw(self.records)
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        self.assertEqual(titles[:2], ["Success, staleness 0", "Success, staleness 2"])
        line, end = figure.axes[0].lines
        self.assertEqual([*line.get_xdata()], [*range(6)])
        # Means of five versions, of fewer at the ends; seed 1 earns 1 more at the last.
        means = [0.5, 0.55, 0.6, 0.7 + 0.1, 0.75 + 0.125, 0.8 + 1 / 6]
        np.testing.assert_allclose(line.get_ydata(), means)
        np.testing.assert_allclose(end.get_xydata(), [[10, 0.55]])
        # Steps 0 to 2 learn from version 0: the curve begins with the last of them.
        stale, _ = figure.axes[1].lines
        np.testing.assert_allclose(stale.get_ydata()[0], 0.5)


if __name__ == "__main__":
    environment.main()
