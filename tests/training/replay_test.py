"""A run's kept episodes teach the same again, and their rewards can be checked."""

import dataclasses
import gzip
import json
import shutil
from unittest import mock

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.environments import protocol
from glm5_jax.rl import episode_files
from glm5_jax.training import episode_reports, loop, replay
from glm5_jax.training.feeds import groups as groups_lib
from glm5_jax.training.feeds import rollouts
from tests import environment, runs
from tests.training import rl_runs

SLOW = 0.02  # seconds that an environment thinks


class ReplayTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.config = dataclasses.replace(rl_runs.STALE, num_steps=4)
        cls.enterClassContext(runs.compile_once(rl_runs.STALE))  # of more steps
        cls.taskset = rl_runs.Lottery(seconds=SLOW)
        make = mock.patch.object(environments, "make", return_value=cls.taskset)
        cls.enterClassContext(make)
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
        lines, counts = episode_reports.rescored(self.config, self.run_folder, steps)
        self.assertEqual(lines, [])
        self.assertEqual(
            counts, {"episodes": 32, "same": 32, "differ": 0, "diverged": 0}
        )
        table = episode_reports.listed(self.run_folder, steps)
        self.assertRegex(table[1], r"^ +1 +2 +8 +0 +0\.\d+  \d ok, \d truncated$")

    def test_another_reward_is_listed(self):
        async def step(message):
            return protocol.StepResult((), protocol.Reward(0.25), True, False)

        with mock.patch.object(self.taskset, "step", step):
            lines, counts = episode_reports.rescored(self.config, self.run_folder, [2])
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
        self.assertFalse((self.root / "none").exists())


if __name__ == "__main__":
    environment.main()
