"""The line to look at: what it shows, and that it fits."""

import sys
from unittest import mock

import tqdm
from absl.testing import absltest, parameterized

from glm5_jax.training.reporting import progress
from tests import environment

FULL = {
    "train/loss": 9.95,
    "train/lm_loss": 7.625,
    "eval/bits_per_byte": 12.345,
    "perf/tokens_per_second": 1234567.0,
    "train/grad_norm": 0.0123,
    "optim/learning_rate": 2e-4,
}


class LogTest(absltest.TestCase):
    def shown(self, *steps, total=10):
        line = progress.Progress(total)
        clock = mock.Mock(side_effect=range(100))  # nobody else's: threads look, too
        with (
            mock.patch.object(progress, "time", mock.Mock(monotonic=clock)),
            mock.patch.object(progress, "_SECONDS_BETWEEN_LINES", 4.5),
            self.assertLogs("absl", "INFO") as logs,
        ):
            for step, values in steps:
                line.show(step, values)
        line.close()
        return [record.getMessage() for record in logs.records]

    def test_lines_now_and_then(self):
        steps = [(step, {"train/loss": 3.0 / step}) for step in range(1, 11)]
        steps[4][1]["eval/bits_per_byte"] = 2.0
        lines = self.shown(*steps)
        self.assertEqual(lines[0], "step 1 of 10: loss 3.000")
        self.assertEqual(lines[-1], "step 10 of 10: loss 0.300, bits/byte 2.000")
        self.assertBetween(len(lines), 3, 5)

    def test_the_loss_is_that_of_the_language_model(self):
        (line,) = self.shown((1, FULL), total=1)
        self.assertStartsWith(line, "step 1 of 1: lm loss 7.625, bits/byte 12.345, ")

    def test_a_line_fits_80_columns_with_its_time(self):
        (line,) = self.shown((100000, FULL), total=100000)
        self.assertLessEqual(len("I1122 13:50:59 " + line), 80)
        self.assertIn("bits/byte", line)

    def test_a_run_on_rollouts_shows_reward_and_success_for_the_loss(self):
        values = {"train/loss": 1e-9, "rollout/reward": 0.5, "eval/success": 0.25}
        (line,) = self.shown((1, values), total=1)
        self.assertEqual(line, "step 1 of 1: reward 0.500, success 25.0%")

    def test_a_value_that_is_not_finite_is_shown(self):
        (line,) = self.shown((1, {"train/lm_loss": None}), total=1)
        self.assertEqual(line, "step 1 of 1: lm loss nan")


class BarTest(parameterized.TestCase):
    @parameterized.parameters((80, 70), (110, 100000), (20, 70))
    def test_metrics_are_whole_or_absent(self, columns, total):
        with mock.patch.object(sys.stderr, "isatty", return_value=True):
            line = progress.Progress(total, start_step=4)
        bar = line._bar
        bar.dynamic_ncols = lambda file: (columns, 24)
        with mock.patch.object(progress.logging, "info") as info:
            line.show(7, FULL)
        info.assert_not_called()
        self.assertEqual((bar.n, bar.total), (7, total))
        self.assertStartsWith(bar.postfix, "lm loss 7.625")
        whole = tqdm.tqdm.format_meter(**bar.format_dict | {"ncols": None})
        if columns >= 80:
            self.assertLessEqual(len(whole), columns)
            self.assertIn("bits/byte 12.345", bar.postfix)
        line.rewind(4)
        self.assertEqual(bar.n, 4)
        line.close()


if __name__ == "__main__":
    environment.main()
