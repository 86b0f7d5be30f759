"""Kills a process that only saves, at random moments, with SIGKILL.

GLM5_JAX_KILLS=50 python -m pytest tests/checkpoint/kill_test.py
"""

import collections
import os
import sys
import time

import numpy as np

from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.checkpoint import manifest, step_folder
from tests import environment, forked
from tests.checkpoint import steps

KILLS = int(os.environ.get("GLM5_JAX_KILLS", "6"))
KEEP = 2
# A save takes about 0.1 s of an idle machine.
LONGEST_LIFE = 0.4  # seconds after the first save
PATIENCE = 300  # seconds for a first save, on a machine under load


def live(folder, said):
    """Resumes and saves until it is killed; reports which steps are safe."""
    environment.configure()
    manager = manager_lib.CheckpointManager(folder, KEEP)
    step = -1
    if manager.latest_step() is not None:
        step, state, _ = manager.restore(steps.abstract(steps.make_state(0)))
        steps.assert_same(state, steps.make_state(step))
    while True:
        step += 1
        manager.save(step, steps.make_state(step), steps.METADATA)
        manager.wait()
        said.send(step)


def moment(checkpoints):
    """Names the activity that the kill interrupted."""
    names = [path.name for path in checkpoints.iterdir()]
    if any("tmp" in name for name in names):
        return "within a save"
    if any(step_folder.DELETING in name for name in names):
        return "within a deletion"
    if not all((checkpoints / name / manifest.NAME).exists() for name in names):
        return "between commit and manifest"
    return "between saves"


class KillTest(steps.StepsTestCase):
    def life(self, seconds):
        """Kills a process some time after its first save; returns the safe steps."""
        hears, says = forked.PROCESSES.Pipe(duplex=False)
        child = forked.PROCESSES.Process(target=live, args=(self.folder, says))
        child.start()
        says.close()
        try:
            self.assertTrue(hears.poll(PATIENCE))
            safe = hears.recv()
            time.sleep(seconds)
        finally:
            child.kill()
            child.join()
        try:
            while True:  # its reports before it died
                safe = hears.recv()
        except EOFError:
            return safe

    def test_safe_steps_survive_a_kill(self):
        rng = np.random.default_rng(0)
        like, moments, last = None, collections.Counter(), -1
        for _ in range(KILLS):
            safe = self.life(rng.uniform(0, LONGEST_LIFE))
            moments[moment(self.checkpoints)] += 1
            self.assertGreater(safe, last)
            like = like or steps.abstract(steps.make_state(0))
            manager = self.open(KEEP)
            last, state, _ = manager.restore(like)
            # The step that it was about to report may be safe as well.
            self.assertIn(last, (safe, safe + 1))
            steps.assert_same(state, steps.make_state(last))
            manager.close()
        sys.stderr.write(f"{KILLS} kills: {dict(moments)}\n")
        manager = self.open(KEEP)
        manager.restore(like)
        manager.save(last + 1, steps.make_state(last + 1), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), sorted([str(last), str(last + 1)]))


if __name__ == "__main__":
    environment.main()
