"""Two real processes agree on values and end together."""

import pathlib
import shutil
import signal
import time

import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.checkpoint import manager as manager_lib
from glm5_jax.checkpoint import manifest, step_folder
from glm5_jax.weights import loading
from tests import environment
from tests.checkpoint import faults_test
from tests.processes import launch, worker

SECONDS_TO_LEAVE = 60  # imports and time without a heartbeat, on a machine under load


def run(scenario, folder, **sizes):
    return launch.fork(worker.run, scenario, folder, **sizes)


class TogetherTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        manager = manager_lib.CheckpointManager(self.folder / "given", keep=3)
        for step in (1, 2):
            manager.save(step, worker.placed(step), worker.METADATA)
        manager.close()

    def test_two_agree_and_read_each_others_steps(self):
        for code, output in run("agree", self.folder):
            self.assertEqual(code, 0, output)
        manager = manager_lib.CheckpointManager(self.folder / "saved", keep=3)
        step, state, metadata = manager.restore(worker.abstract_state())
        manager.close()
        self.assertEqual((step, metadata), (2, worker.METADATA))
        worker.assert_equal(state, 2)
        folder = step_folder.find(self.folder / "saved")
        self.assertEqual(manifest.verify(folder), sum(manifest.files(folder).values()))
        self.assertNotEmpty([f for f in manifest.read(folder) if "process_1" in f])

    def test_a_host_that_lost_its_copy_gets_it_from_a_replica(self):
        """Then a slice is lost for good, and the other goes on alone."""
        for code, output in run("copy_state", self.folder):
            self.assertEqual(code, 0, output)
        both = {i: self.folder / f"host{i}" for i in (0, 1)}
        shutil.copytree(both[1], self.folder / "kept")
        shutil.rmtree(both[0])
        lineage = (self.folder / "lineage").read_text()
        for code, output in run("restore_copies", self.folder):
            self.assertEqual(code, 0, output)
        self.assertEmpty([*both[1].rglob("*.shards")])
        (self.folder / "lineage").write_text(lineage)
        shutil.rmtree(both[0])
        (self.folder / "kept").rename(both[0])
        ((code, output),) = run("restore_copies", self.folder, count=1)
        self.assertEqual(code, 0, output)

    @pytest.mark.slow
    def test_a_step_that_one_process_cannot_read_is_skipped_by_all(self):
        for code, output in run("fall_back", self.folder):
            self.assertEqual(code, 0, output)
        names = {path.name for path in (self.folder / "given/checkpoints").iterdir()}
        self.assertEqual(names, {"1", "2.damaged"})

    @pytest.mark.slow
    def test_damage_that_one_finds_counts_for_all(self):
        """Each process hashes a part of the files; process 0 finds the damaged one."""
        folder = self.folder / "given/checkpoints"
        faults_test.flip(faults_test.largest(folder / "2", "params"))
        for code, output in run("go_on", self.folder):
            self.assertEqual(code, 0, output)
            self.assertIn("STEP 2 IS DAMAGED", output)
        self.assertEqual({p.name for p in folder.iterdir()}, {"1", "2", "2.damaged"})

    @pytest.mark.slow
    def test_one_then_two_then_four_then_one(self):
        for count in (2, 4):
            sizes = {"count": count, "num_devices": 8 // count}
            for code, output in run("go_on", self.folder, **sizes):
                self.assertEqual(code, 0, output)
        manager = manager_lib.CheckpointManager(self.folder / "given", keep=9)
        step, state, _ = manager.restore(worker.abstract_state())
        manager.close()
        self.assertEqual(step, 4)
        worker.assert_equal(state, 4)
        folder = step_folder.find(self.folder / "given")
        writers = [f for f in manifest.read(folder) if "ocdbt.process_3/" in f]
        self.assertNotEmpty(writers)

    @pytest.mark.slow
    def test_each_process_reads_only_its_shards_of_a_release(self):
        release = pathlib.Path(__file__).parent.parent / "golden" / "glm5"
        (self.folder / "release").symlink_to(release)
        params = leaves_lib.flatten(loading.load_model(release)[1])[0]
        whole = {"/".join(p): np.asarray(x, np.float32) for p, x in params.items()}
        np.savez(self.folder / "whole.npz", **whole)
        both = run("import_shards", self.folder)
        for (code, output), experts in zip(
            both, ("0, 1, 2, 3", "4, 5, 6, 7"), strict=True
        ):
            self.assertEqual(code, 0, output)
            self.assertIn(f"experts [{experts}]", output)

    def test_input_that_one_refuses_ends_both_with_2(self):
        self.assert_both_end("refuse", 2, "error: process 1 finds no corpus.")

    @pytest.mark.slow  # like the one above, with another exit code
    def test_a_bug_in_one_ends_both_with_1(self):
        self.assert_both_end("raise_error", 1, "RuntimeError: a bug in process 0")

    def test_if_one_is_killed_the_other_ends(self):
        began = time.monotonic()
        (first, output), (second, _) = run("die", self.folder)
        self.assertNotEqual(first, 0, output)
        self.assertNotIn("done", output)
        self.assertEqual(second, -signal.SIGKILL)
        self.assertLess(time.monotonic() - began, SECONDS_TO_LEAVE)

    def assert_both_end(self, scenario, code, message):
        began = time.monotonic()
        for got, output in run(scenario, self.folder):
            self.assertEqual(got, code, output)
            self.assertIn(message, output)
            self.assertNotIn("done", output)
        self.assertLess(time.monotonic() - began, SECONDS_TO_LEAVE)


if __name__ == "__main__":
    environment.main()
