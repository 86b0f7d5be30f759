import json
import math
import pathlib
import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax.training import metrics
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

    def test_what_is_not_finite_is_null(self):
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

    def test_steps_go_up(self):
        writer = metrics.MetricsWriter(self.workdir, 10)
        writer.write(2, {})
        with self.assertRaisesRegex(AssertionError, "step 2 comes after 2"):
            writer.write(2, {})
        writer.close()

    def test_log_lines_now_and_then_without_a_terminal(self):
        writer = metrics.MetricsWriter(self.workdir, 10)
        with (
            mock.patch.object(metrics.time, "monotonic", side_effect=range(100)),
            mock.patch.object(metrics, "_SECONDS_BETWEEN_LINES", 4.5),
            self.assertLogs("absl", "INFO") as logs,
        ):
            for step in range(1, 11):
                more = {"eval/bits_per_byte": 2.0} if step == 5 else {}
                writer.write(step, {"train/loss": 3.0 / step, **more})
        writer.close()
        messages = [record.getMessage() for record in logs.records]
        self.assertEqual(messages[0], "step 1 of 10: loss 3.0000")
        self.assertEqual(messages[-1], "step 10 of 10: loss 0.3000, bits/byte 2.000")
        self.assertBetween(len(messages), 3, 5)

    def test_a_run_on_rollouts_shows_reward_and_success_for_the_loss(self):
        writer = metrics.MetricsWriter(self.workdir, 1)
        values = {"train/loss": 1e-9, "rollout/reward": 0.5, "eval/success": 0.25}
        with self.assertLogs("absl", "INFO") as logs:
            writer.write(1, values)
        writer.close()
        self.assertEqual(
            logs.records[0].getMessage(), "step 1 of 1: reward 0.500, success 25.0%"
        )

    def test_bar_in_a_terminal(self):
        with mock.patch.object(sys.stderr, "isatty", return_value=True):
            writer = metrics.MetricsWriter(self.workdir, 10, start_step=4)
        with mock.patch.object(metrics.logging, "info") as info:
            writer.write(7, {"train/loss": 2.0})
        self.assertEqual((writer._bar.n, writer._bar.total), (7, 10))
        self.assertIn("loss=2.0000", writer._bar.postfix)
        info.assert_not_called()
        writer.close()


if __name__ == "__main__":
    environment.main()
