"""loss.png: the panels that a run has, and what is drawn in them."""

import json
import pathlib
from unittest import mock

import matplotlib.figure
import numpy as np
from absl.testing import absltest

from glm5_jax.training.reporting import plot
from tests import environment


class PlotLossesTest(absltest.TestCase):
    def draw(self, records):
        """The figure that plot_losses writes."""
        folder = pathlib.Path(self.create_tempdir())
        lines = [json.dumps(record) for record in records]
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        figures = []

        def remember(*args, **kwargs):
            figures.append(figure(*args, **kwargs))
            return figures[-1]

        figure = matplotlib.figure.Figure
        with mock.patch.object(matplotlib.figure, "Figure", remember):
            plot.plot_losses(folder / "metrics.jsonl", folder / "loss.png")
        self.assertEqual((folder / "loss.png").read_bytes()[:4], b"\x89PNG")
        return {axes.get_title("left"): axes for axes in figures[0].axes}

    def test_all_curves(self):
        names = ("loss", "lm_loss", "mtp_loss", "indexer_kl", "grad_norm")
        records = [
            {"step": s, **{f"train/{n}": 5 / s for n in names}} for s in range(1, 41)
        ]
        for record in records:
            record["optim/learning_rate"] = 2e-4
        for record in records[9::10]:
            record["eval/bits_per_byte"] = 100 / record["step"]
        axes = self.draw(records)
        self.assertLen(axes, 5)
        labels = [text.get_text() for text in axes["Training loss"].legend_.texts]
        self.assertEqual(labels, ["next token", "multi-token prediction", "total"])
        held_out = axes["Held-out text"].lines[0]
        np.testing.assert_array_equal(held_out.get_xdata(), [10, 20, 30, 40])
        np.testing.assert_allclose(held_out.get_ydata(), [10, 5, 10 / 3, 2.5])
        self.assertEqual(axes["Held-out text"].texts[0].get_text(), "2.500")
        for name, panel in axes.items():
            self.assertEqual(panel.get_xlabel(), "step", name)
            self.assertNotEmpty(panel.get_ylabel(), name)

    def test_missing_curves_are_left_out(self):
        records = [{"step": 1, "train/loss": 3.0}, {"step": 2, "train/loss": None}]
        axes = self.draw(records)
        self.assertEqual(list(axes), ["Training loss"])
        np.testing.assert_array_equal(axes["Training loss"].lines[0].get_xdata(), [1])

    def test_an_empty_file(self):
        self.assertEqual(list(self.draw([])), ["Training loss"])

    def test_a_run_on_rollouts_shows_its_own_panels(self):
        records = [
            {
                "step": step,
                "train/loss": 1e-9,
                "train/grad_norm": 1.0,
                "rollout/reward": step / 20,
                "rl/logprob_gap": 1e-7 * (step > 3),  # 0 has no logarithm
                "rl/masked_fraction": 0.0,
            }
            for step in range(1, 11)
        ]
        for record in records[4::5]:
            share = record["step"] / 20
            limits = {"_low": share - 0.1, "": share, "_high": share + 0.1}
            record |= {f"eval/success{k}": v for k, v in limits.items()}
        axes = self.draw(records)
        reward, gap, fraction, norm = axes.values()
        self.assertEqual(norm.get_title("left"), "Gradient norm")
        (band,) = reward.collections
        np.testing.assert_allclose(
            sorted({tuple(point) for point in band.get_paths()[0].vertices}),
            [(5, 0.15), (5, 0.35), (10, 0.4), (10, 0.6)],
        )
        np.testing.assert_array_equal(reward.lines[1].get_ydata(), [0.25, 0.5])
        self.assertBetween(reward.get_ylim()[1], 1, 1.2)
        self.assertEqual(gap.get_yscale(), "log")
        self.assertBetween(fraction.get_ylim()[1], 0.01, 0.012)

    def test_a_noisy_curve_has_its_running_mean(self):
        rng = np.random.default_rng(0)
        noise = rng.normal(size=400)
        records = [{"step": i, "train/lm_loss": 3 + x} for i, x in enumerate(noise)]
        pale, mean = self.draw(records)["Training loss"].lines
        np.testing.assert_allclose(pale.get_ydata(), 3 + noise)
        expected = [3 + noise[max(i - 10, 0) : i + 11].mean() for i in range(400)]
        np.testing.assert_allclose(mean.get_ydata(), expected)


if __name__ == "__main__":
    environment.main()
