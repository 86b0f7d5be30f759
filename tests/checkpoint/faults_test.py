"""Damages checkpoints as disks, kills and people do, and checks what runs restore."""

import gc
import json
import os
import pathlib
import resource
import shutil
import tempfile
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from absl.testing import parameterized
from etils import epath

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import inspection, manifest, rollback, step_folder
from glm5_jax.checkpoint import manager as manager_lib
from tests import environment
from tests.checkpoint import steps

FILE_LIMIT = 2**18  # bytes of a file, below those of a step's largest


def largest(step, part="state"):
    """Returns the file with the arrays of the optimizer, or of the parameters."""
    files = (path for path in (step / part).rglob("d/*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def flip(path, byte=None, bit=3):
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if byte is None else byte] ^= 1 << bit
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


def keep_the_manifest_alone(step):
    text = (step / manifest.NAME).read_text()
    empty(step)
    (step / manifest.NAME).write_text(text)


def take_the_manifest_of_1(step):
    shutil.copy(step.parent / "1" / manifest.NAME, step)


def hold_step_1(step):
    """Copies step 1 over step 2; every file still matches its own manifest."""
    shutil.rmtree(step)
    shutil.copytree(step.parent / "1", step)


# After each of these step 2 is set aside, and the run resumes from step 1.
DAMAGE = {
    "flipped_bit_in_optimizer": lambda step: flip(largest(step)),
    "flipped_bit_in_params": lambda step: flip(largest(step, "params")),
    "flipped_bit_in_metadata": lambda step: flip(step / "metadata" / "metadata"),
    "flipped_bit_in_manifest": lambda step: flip(step / manifest.NAME),
    "truncated": lambda step: truncate(largest(step)),
    "truncated_manifest": lambda step: truncate(step / manifest.NAME),
    "deleted": lambda step: largest(step).unlink(),
    "deleted_state": lambda step: shutil.rmtree(step / "state"),
    "zeroed": lambda step: zero(largest(step)),
    "empty_file": lambda step: largest(step).write_bytes(b""),
    "empty_step_folder": empty,
    "no_metadata": lambda step: shutil.rmtree(step / "metadata"),
    "manifest_without_files": keep_the_manifest_alone,
    "empty_manifest": lambda step: (step / manifest.NAME).write_text("{}"),
    "manifest_of_another_step": take_the_manifest_of_1,
    "another_step": hold_step_1,
}


class FaultsTestCase(steps.StepsTestCase):
    """Gives each test a copy of a run's folder with steps 1 and 2."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        template = tempfile.TemporaryDirectory()
        cls.addClassCleanup(template.cleanup)
        cls.abstract = steps.abstract(steps.make_state(0))
        cls.template = pathlib.Path(template.name) / "run"
        manager = manager_lib.CheckpointManager(cls.template, 3)
        for step in (1, 2):
            manager.save(step, steps.make_state(step), steps.METADATA)
        manager.close()

    def setUp(self):
        super().setUp()
        self.folder = self.folder / "run"
        self.checkpoints = self.folder / "checkpoints"
        shutil.copytree(self.template, self.folder)

    def restored(self, manager=None):
        """Returns the step that a run restores, after a check of its state."""
        manager = manager or self.open()
        step, state, metadata = manager.restore(self.abstract)
        steps.assert_same(state, steps.make_state(step))
        self.assertEqual(metadata, steps.METADATA)
        return step

    def remove_manifests(self, *numbers):
        for step in numbers:
            (self.step_folder(step) / manifest.NAME).unlink()


class DamageTest(FaultsTestCase):
    @parameterized.named_parameters((name, name) for name in DAMAGE)
    def test_a_damaged_step_is_set_aside_and_the_previous_one_restored(self, name):
        DAMAGE[name](self.step_folder(2))
        manager = self.open()
        with self.assertLogs(level="ERROR") as logs:
            self.assertEqual(self.restored(manager), 1)
        self.assertRegex("".join(logs.output), "STEP 2 IS DAMAGED: .+")
        self.assertEqual(self.names(), ["1", "2.damaged"])
        # The run saves step 2 again.
        manager.save(2, steps.make_state(2), steps.METADATA)
        manager.close()
        self.assertEqual(self.restored(), 2)
        self.assertEqual(self.names(), ["1", "2", "2.damaged"])

    def test_one_flipped_bit_in_any_file_is_seen(self):
        step = self.step_folder(2)
        rng = np.random.default_rng(0)
        paths = [path for path in step.rglob("*") if path.is_file()]
        self.assertGreater(len(paths), 10)
        for path in paths:
            before = path.read_bytes()
            flip(path, byte=rng.integers(len(before)), bit=rng.integers(8))
            with self.subTest(path), self.assertRaises(config_lib.DamagedError):
                manifest.verify(step_folder.find(step))
            path.write_bytes(before)
        self.assertGreater(manifest.verify(step_folder.find(step)), 0)

    def test_damaged_twice_is_set_aside_twice(self):
        for _ in range(2):
            flip(largest(self.step_folder(2)))
            manager = self.open()
            self.assertEqual(self.restored(manager), 1)
            manager.save(2, steps.make_state(2), steps.METADATA)
            manager.close()
        self.assertEqual(self.names(), ["1", "2", "2.damaged", "2.damaged.2"])

    @parameterized.parameters("flipped_bit_in_params", "empty_step_folder")
    def test_no_readable_step_is_an_error_every_time_and_changes_nothing(self, name):
        """Otherwise a new run could be mistaken for a resumed one."""
        for step in (1, 2):
            DAMAGE[name](self.step_folder(step))
        for _ in range(2):
            manager = self.open()
            self.assertEqual(manager.latest_step(), 2)
            with self.assertRaisesRegex(RuntimeError, "none of the steps") as caught:
                manager.restore(self.abstract)
            self.assertIn(f"{self.step_folder(1)} ", str(caught.exception))
        self.assertEqual(self.names(), ["1", "2"])

    def test_a_named_step_does_not_fall_back(self):
        flip(largest(self.step_folder(2)))
        with self.assertRaisesRegex(config_lib.DamagedError, "other content"):
            self.open().restore(self.abstract, step=2)
        self.assertEqual(self.names(), ["1", "2"])

    def test_exchanged_steps_are_not_read(self):
        self.step_folder(1).rename(self.checkpoints / "aside")
        self.step_folder(2).rename(self.step_folder(1))
        (self.checkpoints / "aside").rename(self.step_folder(2))
        message = "2 holds step 1, not step 2; rename it to 1"
        for read in (
            lambda: self.restored(),
            lambda: manager_lib.restore_params(self.folder, self.abstract["params"]),
            lambda: rollback.by_hand(self.folder, 1),
        ):
            with self.assertRaisesRegex(config_lib.DamagedError, "holds step"):
                read()
        rows = inspection.describe([epath.Path(self.step_folder(2))])
        self.assertRegex(rows[0].problem, message)

    def test_folders_that_are_not_step_numbers_are_ignored(self):
        strangers = ["007", "00020", "\N{ARABIC-INDIC DIGIT THREE}"]
        for name in strangers:
            shutil.copytree(self.step_folder(2), self.checkpoints / name)
        with self.assertLogs(level="WARNING") as logs:
            manager = self.open(keep=2)
        self.assertIn(f"{sorted(strangers)} in ", "".join(logs.output))
        self.assertEqual(self.restored(manager), 2)
        manager.save(3, steps.make_state(3), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), sorted(["2", "3", *strangers]))

    def test_a_step_that_is_a_link_is_unlinked(self):
        elsewhere = self.folder / "elsewhere"
        self.step_folder(1).rename(elsewhere)
        self.step_folder(1).symlink_to(elsewhere)
        manager = self.open(keep=1)
        manager.save(3, steps.make_state(3), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), ["3"])
        self.assertNotEmpty([*elsewhere.iterdir()])

    def test_a_step_that_is_not_finite_is_not_resumed_from(self):
        """Another program may have sealed it; every later save would be refused."""
        state = steps.make_state(3)
        state["params"]["w"] = state["params"]["w"].at[3, 4].set(jnp.nan)
        manager = self.open()
        with mock.patch.object(manager_lib.arrays, "is_finite", return_value=True):
            manager.save(3, state, steps.METADATA)
            manager.wait()
        with self.assertLogs(level="ERROR") as logs:
            self.assertEqual(self.restored(manager), 2)
        self.assertIn("holds a NaN or an infinity", "".join(logs.output))
        self.assertEqual(self.names(), ["1", "2", "3.damaged"])

    def test_messages_name_the_files(self):
        step = self.step_folder(2)
        truncate(largest(step))
        largest(step, "params").unlink()
        message = r"in 2 of \d+ files: params/.*: missing; state/.* of .* bytes"
        with self.assertRaisesRegex(config_lib.DamagedError, message):
            manifest.verify(step_folder.find(step))

    def test_reading_parameters_verifies_only_their_files(self):
        params = self.abstract["params"]
        flip(largest(self.step_folder(2)))  # of the optimizer: not read, not hashed
        got = manager_lib.restore_params(self.folder, params)
        steps.assert_same(got, steps.make_state(2)["params"])
        flip(largest(self.step_folder(2), "params"))
        with self.assertRaisesRegex(config_lib.DamagedError, "params/.*other content"):
            manager_lib.restore_params(self.folder, params)


class KilledTest(FaultsTestCase):
    def test_a_stale_tmp_folder_is_removed(self):
        stale = self.checkpoints / "3.orbax-checkpoint-tmp"
        shutil.copytree(self.step_folder(2), stale)
        manager = self.open()
        self.assertEqual(self.restored(manager), 2)
        manager.save(3, steps.make_state(3), steps.METADATA)  # waits for the removal
        manager.close()
        self.assertEqual(self.names(), ["1", "2", "3"])

    def test_killed_between_commit_and_manifest(self):
        """Step 2 is complete but has no manifest, so the run repeats it."""
        self.remove_manifests(2)
        manager = self.open()
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(self.restored(manager), 1)
        self.assertIn("STEPS [2] ARE SKIPPED", "".join(logs.output))
        self.assertEqual(self.names(), ["1", "2"])
        manager.save(2, steps.make_state(2), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), ["1", "2"])
        self.assertEqual(self.restored(), 2)

    def test_killed_while_the_manifest_is_written(self):
        step = self.step_folder(2)
        (step / manifest.NAME).rename(step / ".manifest-a1b2c3d4.json")
        self.assertNotIn(".manifest-a1b2c3d4.json", manifest.files(epath.Path(step)))
        self.assertEqual(self.restored(), 1)

    def test_killed_during_a_deletion(self):
        half = self.checkpoints / "0.deleting"
        shutil.copytree(self.step_folder(1), half)
        largest(half).unlink()
        self.assertEqual(self.restored(), 2)
        self.assertEqual(self.names(), ["1", "2"])

    def test_killed_after_a_rollback_before_its_first_save_is_safe(self):
        manager = self.open()
        manager.restore(self.abstract, step=1)
        manager._abandon_from(2)
        self.assertEqual(self.names(), ["1", "2.abandoned"])
        self.assertEqual(self.restored(), 1)

    def test_nothing_is_deleted_before_the_new_step_is_safe(self):
        """A step that is still being hashed does not replace an older one."""
        manager = self.open(keep=1)
        hashing, go_on, seal = threading.Event(), threading.Event(), manifest.seal
        self.addCleanup(go_on.set)  # otherwise the thread outlives a failure

        def held(*args):
            hashing.set()
            go_on.wait()
            seal(*args)

        with mock.patch.object(manifest, "seal", held):
            manager.save(3, steps.make_state(3), steps.METADATA)
            self.assertTrue(hashing.wait(timeout=60))
            self.assertEqual(self.names(), ["1", "2", "3"])
            self.assertEqual(step_folder.find(self.folder).name, "2")
            go_on.set()
            manager.wait()
        self.assertEqual(self.names(), ["3"])
        self.assertEqual(self.restored(manager), 3)


# Orbax drops the other reads of a failed restore; Python reports them when it collects.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class NoManifestTest(FaultsTestCase):
    """Steps that an earlier version wrote."""

    def setUp(self):
        super().setUp()
        self.remove_manifests(1, 2)

    def tearDown(self):
        super().tearDown()
        gc.collect()

    def test_without_any_manifest_the_newest_step_is_read_with_a_warning(self):
        manager = self.open(keep=1)
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(self.restored(manager), 2)
        self.assertIn("HAS NO MANIFEST and is read unverified", "".join(logs.output))
        manager.save(3, steps.make_state(3), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), ["3"])  # the first step with a manifest
        self.assertEqual(self.restored(), 3)

    @parameterized.parameters({"step": 1}, {"step": 2, "position": 1}, {"step": "2"})
    def test_a_step_with_metadata_of_another_step_is_skipped(self, **metadata):
        path = self.step_folder(2) / "metadata" / "metadata"
        path.write_text(json.dumps(metadata))
        self.assertEqual(self.restored(), 1)
        self.assertEqual(self.names(), ["1", "2.damaged"])

    @parameterized.parameters("truncated", "deleted", "zeroed", "empty_step_folder")
    def test_a_step_that_orbax_rejects_is_skipped(self, name):
        DAMAGE[name](self.step_folder(2))
        self.assertEqual(self.restored(), 1)
        self.assertEqual(self.names(), ["1", "2.damaged"])

    def test_steps_that_hold_all_arrays_in_one_item_can_be_read(self):
        """Earlier versions wrote the parameters into state/."""
        shutil.rmtree(self.step_folder(2))
        options = ocp.CheckpointManagerOptions()
        names = ("state", "metadata")
        with ocp.CheckpointManager(self.checkpoints, options=options, item_names=names):
            pass
        orbax = ocp.CheckpointManager(self.checkpoints, item_names=names)
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(steps.make_state(2)),
            metadata=ocp.args.JsonSave(steps.METADATA),
        )
        orbax.save(2, args=arguments)
        orbax.close()
        self.assertEqual(self.restored(), 2)
        params = manager_lib.restore_params(self.folder, self.abstract["params"])
        steps.assert_same(params, steps.make_state(2)["params"])
        manager_lib.require_shapes(self.folder, self.abstract["params"])


MOST_THREADS = 8  # of a save


class DiskTest(FaultsTestCase):
    def test_disk_fills_up_while_a_step_is_written(self):
        """The run ends, and the old step stays although only one is kept."""
        manager = self.open(keep=1)
        state = steps.make_state(3)
        noise = jax.random.normal(jax.random.key(0), (2**20,))
        state["params"]["w"] = jnp.reshape(noise, (-1, 64))  # does not compress
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, before[1]))
        try:
            manager.save(3, state, steps.METADATA)
            with self.assertRaisesRegex(Exception, "(?i)file too large|EFBIG"):
                manager.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertGreater(self.wait_for_threads(manager), 0)
        self.assertContainsSubset(["1", "2"], self.names())
        self.assertNotIn("3", self.names())
        # Threads of the failed save may still write; a run would have ended with them.
        seen, files = None, {*self.folder.rglob("*")}
        while seen != files:
            time.sleep(1.0)
            seen, files = files, {*self.folder.rglob("*")}
        manager = self.open(keep=1)
        self.assertEqual(self.restored(manager), 2)
        manager.save(3, steps.make_state(3), steps.METADATA)
        manager.close()
        self.assertEqual(self.names(), ["3"])

    def wait_for_threads(self, manager):
        """Returns how many more threads have failed; each raises its error once."""
        for number in range(MOST_THREADS):
            try:
                manager._orbax.wait_until_finished()
            except Exception as error:
                self.assertIn("too large", str(error))
            else:
                return number
        return self.fail("the same errors come again")

    def test_disk_fills_up_while_the_manifest_is_written(self):
        manager = self.open(keep=1)
        with (
            mock.patch.object(os, "replace", side_effect=OSError(28, "No space left")),
            self.assertRaisesRegex(OSError, "No space left"),
        ):
            manager.save(3, steps.make_state(3), steps.METADATA)
            manager.wait()
        self.assertEqual(self.names(), ["1", "2", "3"])
        self.assertFalse(list(self.step_folder(3).glob("manifest*")))
        manager.save(3, steps.make_state(3), steps.METADATA)  # the disk has room again
        manager.close()
        self.assertEqual(self.names(), ["3"])
        self.assertEqual(self.restored(), 3)

    def test_a_read_only_folder_is_refused(self):
        if os.geteuid() == 0:  # root can write anywhere but into /proc
            folder = pathlib.Path("/proc/run")
        else:
            folder = self.folder
            self.checkpoints.chmod(0o555)
            self.addCleanup(self.checkpoints.chmod, 0o755)
            params = manager_lib.restore_params(folder, self.abstract["params"])
            steps.assert_same(params, steps.make_state(2)["params"])
        with self.assertRaisesRegex(config_lib.InputError, "cannot write checkpoints"):
            manager_lib.CheckpointManager(folder, 3)


class PowerTest(FaultsTestCase):
    def test_every_file_and_folder_of_a_step_is_synced_before_it_counts(self):
        """Compares the names that files have at the time of each sync."""
        synced = []

        def note(descriptor):
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

        manager = self.open()
        with mock.patch.object(os, "fsync", note):
            manager.save(3, steps.make_state(3), steps.METADATA)
            manager.wait()
        step = str(self.step_folder(3))
        wanted = {f"{step}/{name}" for name in manifest.files(epath.Path(step))}
        (written,) = (n for n in synced if n.startswith(f"{step}/.manifest-"))
        wanted |= {written, step}
        wanted |= {str(pathlib.Path(name).parent) for name in wanted} - {
            str(self.checkpoints)
        }
        self.assertContainsSubset(wanted, synced)
        files = [i for i, name in enumerate(synced) if name in wanted]
        sealed = synced.index(written)
        self.assertEqual(synced[sealed + 1 :], [step])  # the rename, last of all
        self.assertGreater(sealed, min(files))

    def test_rollback_json_is_synced(self):
        synced = []
        with mock.patch.object(
            os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        ):
            rollback.write(self.folder, rollback.Rollback(1, 2, None))
        written, folder = synced
        self.assertStartsWith(written, f"{self.folder}/.rollback-")
        self.assertEqual(folder, str(self.folder))


class FormatTest(FaultsTestCase):
    def test_sha256sum_can_check_a_manifest(self):
        """The manifest's hashes equal those that sha256sum prints."""
        step = self.step_folder(2)
        content = json.loads((step / manifest.NAME).read_text())
        lines = [f"{sha}  {name}\n" for name, (_, sha) in content["files"].items()]
        sums = self.folder / "sums"
        sums.write_text("".join(lines))
        self.assertEqual(os.system(f"cd {step} && sha256sum --quiet -c {sums}"), 0)
        on_disk = {str(path.relative_to(step)) for path in step.rglob("*")}
        files = {name for name in on_disk if (step / name).is_file()}
        self.assertEqual(files, {*content["files"], manifest.NAME})


if __name__ == "__main__":
    environment.main()
