"""SIGKILL at random moments of reinforcement learning.

GLM5_JAX_KILLS=20 python -m pytest -m slow tests/training/async_kill_test.py
"""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from glm5_jax.rl import episode_files
from glm5_jax.training import replay
from glm5_jax.training.reporting import metrics
from tests import environment, runs
from tests.training import rl_runs

KILLS = int(os.environ.get("GLM5_JAX_KILLS", "3"))
ROOT = pathlib.Path(__file__).parents[2]
MOST = 16  # answers of a life that is killed, as two steps need
NUM_STEPS = 2 * KILLS + 4  # more than such lives can take


@pytest.mark.slow  # two minutes, most of which compile
class KillTest(runs.OneDeviceTest):
    def run_to_the_end(self, folder, *arguments):
        command = [sys.executable, "-m", "tests.training.rl_runs", folder, *arguments]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)

    def killed(self, folder, *arguments):
        """Kills lives of a run; an answer takes 0.2 s.

        So they are killed in rollouts, updates and saves.
        """
        command = [sys.executable, "-m", "tests.training.rl_runs", folder, *arguments]
        rng = np.random.default_rng(0)
        for _ in range(KILLS):
            with subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, text=True
            ) as process:
                for _ in range(rng.integers(1, MOST + 1)):
                    self.assertEqual(process.stdout.readline(), "answer\n")
                time.sleep(rng.uniform(0, 0.4))
                process.kill()
            self.assertLess(process.returncode, 0, "it ended by itself")

    def test_a_killed_run_loses_no_group_and_none_is_too_old(self):
        run, arguments = self.root / "run", ("0.2", str(NUM_STEPS), "2")
        self.killed(run, *arguments)
        self.run_to_the_end(run, *arguments)

        records = metrics.read(run / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [*range(1, NUM_STEPS + 1)])
        self.assertLessEqual(max(r["rollout/staleness_max"] for r in records), 2)
        ledger = {k: v for k, v in records[-1].items() if k.startswith("groups/")}
        self.assertEqual(ledger.pop("groups/begun"), sum(ledger.values()))
        steps = episode_files.read_whole(run, range(1, NUM_STEPS + 1))
        learnt = [group[0].group for step in steps for group in step.groups]
        self.assertLen(set(learnt), 2 * NUM_STEPS)
        # Groups that began and were not learnt from are those under way at the end.
        self.assertLessEqual(max(learnt), 2 * NUM_STEPS + 2 * 2)
        self.assertTrue(replay.replay(run).is_same)

    def test_a_killed_synchronous_run_ends_with_the_same_bits(self):
        calm, run = self.root / "calm", self.root / "synchronous"
        self.run_to_the_end(calm, "0", str(NUM_STEPS))
        self.killed(run, "0.2", str(NUM_STEPS))
        self.run_to_the_end(run, "0.2", str(NUM_STEPS))
        config = rl_runs.make_config(num_steps=NUM_STEPS)
        rl_runs.assert_same_state(run, calm, config)
        self.assertEqual(*map(rl_runs.computed, (run, calm)))


if __name__ == "__main__":
    environment.main()
