"""A run's kept episodes teach the same again, and their rewards can be checked."""

import dataclasses
import gzip
import itertools
import json
import shutil
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.environments import protocol
from glm5_jax.rl import episode_files, publisher
from glm5_jax.training import episode_reports, loop, policy, replay
from glm5_jax.training.feeds import groups as groups_lib
from glm5_jax.training.feeds import policy_batch, rollouts
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import health as health_lib
from tests import environment
from tests.training import rl_runs

GAP_ATOL = 1e-5  # of a log-probability in float32, summed in another order


class ReplayTest(rl_runs.StaleTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.config = dataclasses.replace(rl_runs.STALE, num_steps=4)
        cls.run_folder = cls.root / "run"
        loop.train(cls.config, cls.run_folder)

    def copied(self):
        folder = self.root / self.id()
        shutil.copytree(self.run_folder, folder)
        return folder

    def test_stale_steps_give_the_same_parameters_bit_for_bit(self):
        found = replay.replay(self.run_folder)
        self.assertEqual((found.first, found.last, found.is_same), (0, 4, True))
        tokens = [
            version
            for step in episode_files.read_whole(self.run_folder, [1, 2, 3, 4])
            for group in step.groups
            for episode in group
            for sample in episode.samples
            for version in sample.versions
        ]
        self.assertGreater(max(tokens), 0)  # versions were told apart
        middle = replay.replay(self.run_folder, 3)  # there is no checkpoint
        self.assertEqual((middle.first, middle.last, middle.is_same), (0, 3, None))
        self.assertNotEqual(middle.sha256, found.sha256)

    def test_a_replay_begins_with_a_checkpoint_where_the_first_steps_are_gone(self):
        folder = self.copied()
        for step in (1, 2):
            episode_files.path_of(folder, step).unlink()
        found = replay.replay(folder)
        self.assertEqual((found.first, found.last, found.is_same), (2, 4, True))
        self.assertEqual(found.sha256, replay.replay(self.run_folder).sha256)
        episode_files.path_of(folder, 3).unlink()
        with self.assertRaisesRegex(config_lib.InputError, "kept are those of 4, and"):
            replay.replay(folder)

    def test_another_log_prob_is_noticed(self):
        folder = self.copied()
        path = episode_files.path_of(folder, 4)
        record = json.loads(gzip.decompress(path.read_bytes()))
        for episode in record["episodes"]:
            sample = episode["samples"][0]
            sample["logprobs"] = [
                x - 1e-3 * m
                for x, m in zip(sample["logprobs"], sample["mask"], strict=True)
            ]
        path.write_bytes(gzip.compress(json.dumps(record).encode()))
        found = replay.replay(folder)
        self.assertIs(found.is_same, False)
        self.assertGreater(found.different, 0)

    def test_every_episode_is_kept_once_and_scored_alike(self):
        steps = episode_reports.steps_of(self.run_folder, "")
        self.assertEqual(steps, [1, 2, 3, 4])
        kept = episode_files.read_whole(self.run_folder, steps)
        lines, counts = episode_reports.rescored(self.config, self.run_folder, kept)
        self.assertEqual(lines, [])
        self.assertEqual(
            counts, {"episodes": 32, "same": 32, "differ": 0, "diverged": 0}
        )
        table = episode_reports.listed(kept)
        self.assertRegex(table[1], r"^ +1 +0 +2 +8 +0 +0\.\d+  \d ok, \d truncated$")

    def test_another_reward_is_listed(self):
        async def step(message):
            return protocol.StepResult((), protocol.Reward(0.25), True, False)

        with mock.patch.object(self.taskset, "step", step):
            kept = episode_files.read_whole(self.run_folder, [2])
            lines, counts = episode_reports.rescored(self.config, self.run_folder, kept)
        self.assertEqual(counts["differ"], 8)
        self.assertLen(lines, 8)
        self.assertRegex(lines[0], r"^step 2 \S+: .*luck=[\d.]+ -> .*0\.25$")

    def test_steps_that_are_not_kept_are_refused(self):
        self.assertEqual(episode_reports.steps_of(self.run_folder, "3-9"), [3, 4])
        for text, words in (("x", "must be N or M-N"), ("7", "has steps 1 to 4")):
            with self.assertRaisesRegex(config_lib.InputError, words):
                episode_reports.steps_of(self.run_folder, text)

    def test_a_run_may_keep_none_and_not_less(self):
        with self.assertRaisesRegex(config_lib.InputError, "episodes_gib must be"):
            rl_runs.make_config({"episodes_gib": -1.0})
        rl = dataclasses.replace(self.config.rl, episodes_gib=0.0)
        feed = rollouts.Rollouts(dataclasses.replace(self.config, rl=rl))
        feed._drawn = 0, groups_lib.Played([], [], [], {})
        feed.begin(self.root / "none", 0)
        feed.keep(1, None)
        feed.check({policy.GAP: 0.0, "train/grad_norm": float("nan")}, 1)
        self.assertFalse((self.root / "none").exists())

    @parameterized.parameters("train/grad_norm", "critic/grad_norm")
    def test_a_batch_without_a_finite_gradient_is_kept_apart(self, name):
        feed, folder = rollouts.Rollouts(self.config), self.root / self.id()
        feed.begin(folder, 0)
        norms = {"train/grad_norm": 1.0, "critic/grad_norm": 1.0}
        for step in (1, 2):
            feed._drawn = step + 3, groups_lib.Played([], [], [], {})
            feed.keep(step, None)
            feed.check({policy.GAP: 0.0, **norms}, step)
        self.assertFalse((folder / "skipped").exists())
        with self.assertLogs(level="WARNING") as logs:
            feed.check({policy.GAP: 0.0, **norms, name: float("inf")}, 2)
        feed.close()
        self.assertIn(f"{folder}/skipped/5.json.gz", logs.output[0])
        self.assertRegex(logs.output[0], "of step 2 is .* --skipped --steps=5 --replay")
        kept = episode_files.read(folder, 5, episode_files.SKIPPED)
        self.assertEqual((kept.step, kept.position), (2, 5))


class SkippedTest(rl_runs.StaleTest):
    """Runs some of whose batches have no finite gradient."""

    def spoiling(self, *positions):
        """Patches what makes batches, also of kept episodes."""
        make = policy_batch.make

        def spoilt(config, groups, position):
            batch = make(config, groups, position)
            if position in positions:
                batch["advantages"] = np.full_like(batch["advantages"], np.nan)
            return batch

        return mock.patch.object(policy_batch, "make", spoilt)

    def test_a_skipped_update_gives_the_same_weights_the_next_number(self):
        publish, published = publisher.publish, {}

        def seen(engine, params, version, weights):
            published.setdefault(version, jax.device_get(params))
            publish(engine, params, version, weights)

        with self.spoiling(2, 3), mock.patch.object(publisher, "publish", seen):
            loop.train(rl_runs.STALE, self.root / "numbers")
        is_new = [
            any(jax.tree.leaves(jax.tree.map(lambda a, b: np.any(a != b), old, new)))
            for old, new in itertools.pairwise(published.values())
        ]
        self.assertEqual([*published], [0, 1, 2, 3, 4, 5, 6])
        self.assertEqual(is_new, [True, True, False, False, True, True])
        records = metrics.read(self.root / "numbers" / "metrics.jsonl")
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)
        gaps = [
            max(record[f"rl/logprob_gap/stale_{n}"] for n in (1, 2))
            for record in records
        ]
        # Versions 2, 3 and 4 are one policy, which step 5 knows to be its own.
        *_, stale = (records[4][f"rl/tokens/stale_{n}"] for n in (1, 2))
        self.assertGreater(stale, 0)
        self.assertLess(gaps[4], GAP_ATOL)
        self.assertGreater(max(gaps), 1e-3)

    def test_a_skipped_step_is_computed_again_after_its_rollback(self):
        health = config_lib.HealthConfig(
            max_skipped_in_a_row=2, on_not_finite="roll_back"
        )
        config = dataclasses.replace(rl_runs.STALE, health=health, checkpoint_every=3)
        judge, judged = health_lib.Health.must_roll_back, {}

        def seen(health, step, metrics):
            judged.setdefault(step, metrics)  # as it was the first time
            return judge(health, step, metrics)

        folder = self.root / "rolled_back"
        with (
            self.spoiling(4, 5),
            mock.patch.object(health_lib.Health, "must_roll_back", seen),
        ):
            loop.train(config, folder)
            again = {n: replay.replay(folder, skipped=n) for n in (3, 4, 5)}
        self.assertTrue(replay.replay(folder).is_same)
        for position, found in again.items():
            step = position + 1
            self.assertEqual((found.first, found.last, found.is_same), (3, step, None))
            self.assertIn("rl/ratio", found.metrics)
            told = {n: float(judged[step][n]) for n in found.metrics}
            self.assertEqual(found.metrics, metrics.finite(told))
            is_spoilt = position > 3
            self.assertEqual(found.metrics["train/grad_norm"] is None, is_spoilt)
        # A skipped update leaves the weights as they are.
        self.assertEqual(again[4].sha256, again[3].sha256)
        self.assertEqual(again[5].sha256, again[3].sha256)
        episode_files.path_of(folder, 3, episode_files.SKIPPED).unlink()
        with self.assertRaisesRegex(config_lib.InputError, "need batch 3 of step 4"):
            replay.replay(folder, skipped=5)


if __name__ == "__main__":
    environment.main()
