"""Episodes that share rows are learnt from as if each had one."""

import dataclasses
from unittest import mock

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.rl import episode_files
from glm5_jax.training import loop, policy, replay
from glm5_jax.training.feeds import policy_batch
from glm5_jax.training.reporting import metrics
from tests import environment, runs
from tests.training import rl_runs

ROWS, LENGTH = 4, 80  # 8 episodes, of which a row holds two or three
ORDER_ATOL = 1e-6  # of sums of order 0.1 in float32, in another order


class PackedRowsTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        config = rl_runs.make_config(
            {"rows_per_step": ROWS, "router_replay": True, "objective": "dis"},
            rl_runs.PLAIN,
            stage="async_rl",
            num_steps=2,
        )
        data = dataclasses.replace(config.data, sequence_length=LENGTH)
        cls.config = dataclasses.replace(config, data=data)
        make = mock.patch.object(environments, "make", return_value=rl_runs.Lottery())
        cls.enterClassContext(make)
        cls.run_folder = cls.root / "run"
        cls.enterClassContext(runs.compile_once(cls.config))
        loop.train(cls.config, cls.run_folder)  # the gate compares with the engine

    def batches(self):
        """The second step's rows, packed and not."""
        kept = episode_files.read(self.run_folder, 2)
        groups = [[*group] for group in kept.groups]
        rl = dataclasses.replace(self.config.rl, rows_per_step=0)
        configs = self.config, dataclasses.replace(self.config, rl=rl)
        return [policy_batch.make(c, groups, kept.position) for c in configs]

    def test_rows_hold_several_and_every_token_is_there(self):
        packed, alone = self.batches()
        self.assertEqual((len(packed["tokens"]), len(alone["tokens"])), (ROWS, 8))
        self.assertGreater(packed["segment_ids"].max(), 1)
        for name in packed:
            both = [x[name][x["segment_ids"] > 0] for x in (packed, alone)]
            if name != "segment_ids":
                flat = [sorted(map(bytes, x)) for x in both]
                self.assertEqual(*flat, name)
        line = metrics.read(self.run_folder / "metrics.jsonl")[1]
        share = np.mean(packed["segment_ids"] > 0)
        self.assertAlmostEqual(line["rollout/filled_share"], share, places=6)
        self.assertGreater(share, 0.5)

    def test_loss_and_gradient_are_those_of_a_row_each(self):
        params = runs.params_of(self.run_folder, self.config.model)
        step = jax.jit(policy.value_and_grad, static_argnums=1)
        packed, alone = self.batches()
        # Rows of padding, of which policy_test.py has a test: both have one program.
        padded = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in packed.items()}
        found = [step(params, self.config, batch) for batch in (padded, alone)]
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ORDER_ATOL),
            *[(loss, grads) for (loss, _), grads in found],
        )
        tokens = [seen["rl/trained_tokens"] for (_, seen), _ in found]
        self.assertEqual(*tokens)

    def test_a_replay_packs_them_alike(self):
        self.assertTrue(replay.replay(self.run_folder).is_same)

    def test_what_does_not_fit_makes_a_second_batch(self):
        rl = dataclasses.replace(self.config.rl, rows_per_step=1)
        config = dataclasses.replace(self.config, rl=rl)
        kept = episode_files.read(self.run_folder, 1)
        groups = [[*group] for group in kept.groups]
        batch = policy_batch.make(config, groups, kept.position)
        self.assertGreater(len(batch["tokens"]), 1)
        whole = policy_batch.make(self.config, groups, kept.position)
        self.assertEqual(batch["loss_mask"].sum(), whole["loss_mask"].sum())

    def test_a_ratio_of_whole_rows_is_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "rows_per_step must be 0"):
            rl_runs.make_config({"objective": "gspo", "rows_per_step": 4})
        with self.assertRaisesRegex(config_lib.InputError, "must divide rows_per_step"):
            rl_runs.make_config({"updates_per_rollout": 2, "rows_per_step": 5})


if __name__ == "__main__":
    environment.main()
