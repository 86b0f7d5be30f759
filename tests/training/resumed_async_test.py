"""What a killed asynchronous run must not go on with."""

import contextlib
import dataclasses
from unittest import mock

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.rl import publisher
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from glm5_jax.training import loop, replay
from glm5_jax.training.feeds import own_engine, rollouts
from glm5_jax.training.reporting import metrics
from tests import environment
from tests.training import rl_runs

LIMITS = {"max_skipped_in_a_row": 1, "on_not_finite": "roll_back"}
CONFIG = dataclasses.replace(rl_runs.STALE, health=config_lib.HealthConfig(**LIMITS))


def spoiling(wanted):
    """A feed whose batch at a position has no finite gradient."""
    plain = rollouts.Rollouts.next

    def spoilt(feed, params, position):
        batch, seen = plain(feed, params, position)
        if position == wanted:
            batch["advantages"] = np.full_like(batch["advantages"], np.nan)
        return batch, seen

    return mock.patch.object(rollouts.Rollouts, "next", spoilt)


class ResumedTest(rl_runs.StaleTest):
    def train(self, folder, config=CONFIG):
        """Trains; returns the indices of the groups that each step took of actors."""
        steps, take = [], orchestrator_lib.Orchestrator.take

        async def taken(orchestrator, stall_seconds):
            groups = await take(orchestrator, stall_seconds)
            steps.append([index for index, _ in groups])
            return groups

        with mock.patch.object(orchestrator_lib.Orchestrator, "take", taken):
            loop.train(config, folder)
        return steps

    def killed(self, patch=None):
        """The folder of a run as it was before its fifth batch, and its steps."""
        folder, killed = self.root / self.id() / "alive", self.root / self.id() / "dead"
        take = own_engine.OwnEngine.take

        def copied(actors, version):
            if version == 4:
                rl_runs.copy_as_killed(actors, folder, killed)
            return take(actors, version)

        with (
            patch or contextlib.nullcontext(),
            mock.patch.object(own_engine.OwnEngine, "take", copied),
        ):
            return killed, self.train(folder)

    def test_batches_that_a_rollback_skipped_stay_skipped_after_a_kill(self):
        folder, steps = self.killed(spoiling(3))
        again = {index for step in self.train(folder) for index in step}
        self.assertFalse(again & {index for step in steps[:4] for index in step})
        records = metrics.read(folder / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4, 5, 6])
        self.assertNotIn("groups/dropped_stale", records[-1])
        ledger = {k: v for k, v in records[-1].items() if k.startswith("groups/")}
        self.assertEqual(ledger.pop("groups/begun"), sum(ledger.values()))

    def test_a_rollback_ends_what_is_learnt_again(self):
        folder, steps = self.killed()
        with spoiling(2):
            again = {index for step in self.train(folder) for index in step}
        self.assertFalse(again & {index for step in steps[:3] for index in step})
        self.assertTrue(replay.replay(folder).is_same)

    def test_a_run_goes_on_once_its_engine_is_repaired(self):
        folder, publish = self.root / self.id(), publisher.publish
        config = rl_runs.make_async(0, num_steps=6)

        def wrong(engine, params, version, weights):
            if version == 3:
                params = jax.tree.map(lambda x: x * 1.01, params)
            publish(engine, params, version, weights)

        with (
            mock.patch.object(publisher, "publish", wrong),
            self.assertRaises(rollouts.GapError),
        ):
            self.train(folder, config)
        self.assertLen(self.train(folder, config), 3)  # step 3 learns from its file
        records = metrics.read(folder / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4, 5, 6])
        self.assertLess(max(r["rl/logprob_gap"] for r in records), 1e-5)


if __name__ == "__main__":
    environment.main()
