"""The rates that a clock tells of a step, on a chip whose peak is known."""

from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.training.reporting import accounting
from glm5_jax.training.run import clock as clock_lib
from glm5_jax.training.run import state
from tests import environment

PEAK = 1e9  # FLOP/s
LENGTH = 128


class UtilisationTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("whole_rows", np.ones((2, LENGTH), np.int32), 1 - 1e-9, 1 + 1e-9),
        ("half_padding", np.repeat([[1, 0]], LENGTH // 2, axis=1), 0.4, 0.5 - 1e-6),
        ("two_documents", np.repeat([[1, 2]], LENGTH // 2, axis=1), 0.8, 1 - 1e-6),
    )
    def test_of_rows_and_of_the_documents_in_them(self, segments, least, most):
        """Padding takes its share away, and short documents attend less."""
        data = config_lib.DataConfig(sequence_length=LENGTH)
        config = config_lib.TrainConfig(model=presets.GLM5_1M, data=data)
        run = mock.Mock(spec=state.Run, config=config, feed=mock.Mock())
        run.compile_seconds = run.restore_seconds = 0.0
        run.feed.is_on_policy = False
        with mock.patch.object(accounting, "peak_flops", return_value=PEAK):
            clock = clock_lib.Clock(run)
        metrics = {
            "train/loss": np.float32(1),
            "data/batch_tokens": segments.size,
            "data/document_flops": accounting.flops_of_documents(
                config.model, segments
            ),
        }
        found = clock.read(metrics)
        ratio = found["perf/mfu_documents"] / found["perf/mfu"]
        self.assertBetween(ratio, least, most)
        del metrics["data/document_flops"]  # a feed that does not tell them
        self.assertNotIn("perf/mfu_documents", clock.read(metrics))


if __name__ == "__main__":
    environment.main()
