"""One process at a time writes a run's folder; a dead one holds no lock."""

import os
import pathlib
import select
import signal
import subprocess
import sys
from unittest import mock

from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.checkpoint import rollback
from glm5_jax.processes import folder_lock, simulate
from glm5_jax.training import loop
from tests import environment

HOLD = """
import sys, time
from glm5_jax.processes import folder_lock
with folder_lock.held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


class LockTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)

    def files(self):
        return {p: p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}

    def test_a_second_start_is_refused_before_it_writes(self):
        config = config_lib.TrainConfig(model=presets.GLM5_1M, sample_tokens=0)
        (self.folder / "checkpoints").mkdir()
        (self.folder / simulate.LOGS).mkdir()
        (self.folder / simulate.LOGS / "process_0.log").write_text("precious")
        with folder_lock.held(self.folder):
            before = self.files()
            for write in (
                lambda: loop.train(config, self.folder),
                lambda: simulate.run(config, self.folder, 2),
                lambda: rollback.by_hand(self.folder, 3),
            ):
                with self.assertRaisesRegex(
                    config_lib.InputError, f"process {os.getpid()} on .* writes into"
                ):
                    write()
            self.assertEqual(self.files(), before)
        self.assertFalse((self.folder / folder_lock.NAME).exists())

    def test_it_is_free_once_its_holder_is_dead(self):
        command = [sys.executable, "-c", HOLD, str(self.folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            with self.assertRaises(config_lib.InputError):
                folder_lock.held(self.folder).__enter__()
            child.kill()
        with folder_lock.held(self.folder):
            pass

    def test_a_lock_file_deleted_meanwhile_is_no_lock(self):
        """The owner deletes the file after we open it and before we lock it."""
        path, taken = self.folder / folder_lock.NAME, []

        def take_away(*args):
            if not taken:
                taken.append(path.unlink())
            return lock(*args)

        lock = folder_lock.fcntl.flock
        with (
            mock.patch.object(folder_lock.fcntl, "flock", take_away),
            folder_lock.held(self.folder),
        ):
            self.assertTrue(path.exists())
            with self.assertRaises(config_lib.InputError):
                folder_lock.held(self.folder).__enter__()


PARENT = """
import os, pathlib, sys, time
from glm5_jax.processes import simulate
child = simulate.start(["sleep", "60"], os.environ, pathlib.Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(60)
"""


class ParentTest(absltest.TestCase):
    def test_simulated_processes_die_with_their_parent(self):
        log = self.create_tempfile().full_path
        command = [sys.executable, "-c", PARENT, log]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            child = int(parent.stdout.readline())
            waiting = os.pidfd_open(child)
            self.addCleanup(os.close, waiting)
            parent.send_signal(signal.SIGKILL)
        is_over, _, _ = select.select([waiting], [], [], 10)
        self.assertTrue(is_over)


if __name__ == "__main__":
    environment.main()
