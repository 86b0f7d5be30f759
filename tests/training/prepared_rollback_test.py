"""A rollback of a run on a prepared mixture: its bad batches do not come again."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from glm5_jax import config as config_lib
from glm5_jax.training import loop
from glm5_jax.training.feeds import corpus
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import health as health_lib
from tests import environment, runs, small_configs
from tests.training import health_test, prepared_run_test

BAD = 7  # position of the batch; the mixture's weights change at 3 and at 8


class PreparedRollbackTest(runs.OneDeviceTest):
    def setUp(self):
        super().setUp()
        config = small_configs.mixture_run(
            *prepared_run_test.prepare(self.root),
            mixture_weights=((0.75, 0.25), (0.25, 0.75), (0.5, 0.5)),
            mixture_steps=(3, 8),
        )
        health = config_lib.HealthConfig(
            max_skipped_in_a_row=1, on_not_finite="roll_back"
        )
        self.config = dataclasses.replace(config, num_steps=10, health=health)
        self.enterContext(runs.compile_once(self.config))

    def train(self, name, change):
        """Returns the batches by their positions, as they were drawn."""
        plain, drawn = corpus.Corpus.next, []

        def next_batch(feed, params, position):
            batch, seen = change(plain, feed, params, position)
            drawn.append((position, batch))
            return batch, seen

        with mock.patch.object(corpus.Corpus, "next", next_batch):
            loop.train(self.config, self.root / name)
        return drawn

    @pytest.mark.slow
    def test_resumes_after_the_bad_batch(self):
        spoil = health_test.without_a_number({BAD})

        def spoilt(plain, feed, params, position):
            batch, seen = plain(feed, params, position)
            return spoil(batch, position), seen

        def without_6_and_7(plain, feed, params, position):
            return plain(feed, params, position + 2 * (position >= 6))

        drawn = self.train("bad", spoilt)
        # The checkpoint is of step 6; batch 8 was drawn before the loss of 7 was read.
        wanted = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11]
        self.assertEqual([position for position, _ in drawn], wanted)
        feed = corpus.Corpus(self.config)
        for position, batch in drawn:
            same, _ = feed.next({}, position)
            np.testing.assert_array_equal(batch["tokens"], same["tokens"])
        self.train("wanted", without_6_and_7)
        ended = [
            runs.params_of(self.root / name, small_configs.TEXT_MODEL)
            for name in ("bad", "wanted")
        ]
        jax.tree.map(np.testing.assert_array_equal, *ended)
        last = metrics.read(self.root / "bad" / "metrics.jsonl")[-1]
        self.assertEqual((last["step"], last[health_lib.ROLLBACKS]), (10, 1))
        epochs = feed.next({}, 11)[1]
        self.assertEqual({name: last[name] for name in epochs}, epochs)


if __name__ == "__main__":
    environment.main()
