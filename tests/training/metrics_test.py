"""metrics.jsonl: what is written, cut off by a crash, and read again."""

import json
import math
import pathlib

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax.training.reporting import metrics
from tests import environment


class MetricsWriterTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.workdir = pathlib.Path(self.create_tempdir())
        self.path = self.workdir / "metrics.jsonl"

    def write(self, *steps, start=0, value=0.5):
        writer = metrics.MetricsWriter(self.workdir, 10, start)
        for step in steps:
            writer.write(step, {"train/loss": value})
        writer.close()

    def test_one_object_a_step_as_it_happens(self):
        writer = metrics.MetricsWriter(self.workdir, 10)
        writer.write(1, {"train/loss": jnp.float32(2.5), "moe/max_load": np.int32(3)})
        self.assertEqual(
            [json.loads(line) for line in self.path.read_text().splitlines()],
            [{"step": 1, "train/loss": 2.5, "moe/max_load": 3}],
        )
        writer.close()

    def test_a_value_that_is_not_finite_is_null(self):
        writer = metrics.MetricsWriter(self.workdir, 10)
        writer.write(1, {"a": jnp.nan, "b": math.inf, "c": jnp.bfloat16(1)})
        writer.close()
        self.assertEqual(
            metrics.read(self.path), [{"step": 1, "a": None, "b": None, "c": 1.0}]
        )
        self.assertNotIn("NaN", self.path.read_text())

    def test_resume_keeps_each_step_once(self):
        self.write(1, 2, 3, 4, value=1)
        self.write(3, 4, 5, start=2, value=2)
        found = {r["step"]: r["train/loss"] for r in metrics.read(self.path)}
        self.assertEqual(found, {1: 1, 2: 1, 3: 2, 4: 2, 5: 2})
        self.assertLen(metrics.read(self.path), 5)

    def test_a_fresh_run_drops_an_older_ones_lines(self):
        self.write(1, 2, 3)
        self.write(1)
        self.assertLen(metrics.read(self.path), 1)

    def test_half_a_line_is_dropped_on_resume(self):
        self.write(1, 2)
        with self.path.open("a") as file:
            file.write('{"step": 3, "train/l')
        self.write(3, start=2)
        self.assertEqual([r["step"] for r in metrics.read(self.path)], [1, 2, 3])
        self.assertEqual(self.path.read_text().count("\n"), 3)

    def test_lines_that_are_no_records_are_skipped_and_dropped_on_resume(self):
        """A disk that lost a block, an editor or another program left them."""
        wrong = (
            *("null", "1", '"step"', "[1]", '["step"]', "{}", "\xff", "\0" * 9),
            *('{"step": null}', '{"step": "1"}', '{"step": 1.0}', '{"step": true}'),
            *('{"step": [1]}', '{"step": NaN}', '{"train/loss": 2}', "[" * 100_000),
            *('{"step": 1, "train/loss": "2"}', '{"step": 1, "train/loss": {}}'),
            f'{{"step": {"9" * 5000}}}',
        )
        self.write(1)
        good = self.path.read_text()
        for line in wrong:
            self.path.write_text(f"{line}\n{good}{line}\n", encoding="latin-1")
            with self.assertLogs(level="WARNING") as logs:
                self.assertEqual(metrics.read(self.path), [json.loads(good)], line[:9])
            self.assertLen(logs.output, 2)
            self.assertIn("metrics.jsonl: skipping a damaged line", logs.output[0])
        self.path.write_text("\n".join([*wrong, good, ""]), encoding="latin-1")
        writer = metrics.MetricsWriter(self.workdir, 10, 1)
        self.assertEqual(writer.before, json.loads(good))
        writer.close()
        self.assertEqual(self.path.read_text(), good)

    def test_a_number_that_json_has_not_is_read_as_null(self):
        self.path.write_text('{"step": 1, "a": NaN, "b": -Infinity, "c": 1e999}\n')
        want = [{"step": 1, "a": None, "b": None, "c": None}]
        self.assertEqual(metrics.read(self.path), want)

    def test_steps_go_up(self):
        writer = metrics.MetricsWriter(self.workdir, 10)
        writer.write(2, {})
        with self.assertRaisesRegex(AssertionError, "step 2 comes after 2"):
            writer.write(2, {})
        writer.close()


if __name__ == "__main__":
    environment.main()
