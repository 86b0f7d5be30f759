"""Checks which unfinished folders are removed, and by which process."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
import subprocess
import sys
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.weights import new_folder
from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
WRITER = """
import sys, time
from glm5_jax.weights import new_folder
with new_folder.new_folder(sys.argv[1]) as partial:
    (partial / "half").write_text("of it")
    print(partial.name, flush=True)
    time.sleep(600)
"""


class NewFolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.parent = pathlib.Path(self.create_tempdir().full_path)
        self.folder = self.parent / "out"

    def names(self):
        return sorted(path.name for path in self.parent.iterdir())

    def start_writer(self):
        """Starts a process that stops within a write; returns it and its folder."""
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(self.folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(child.stdout.close)
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        return child, child.stdout.readline().strip()

    def make(self):
        with new_folder.new_folder(self.folder) as partial:
            (partial / "whole").write_text("all of it")

    def test_others_may_read_the_folder_but_not_write_it(self):
        """mkdtemp makes folders for their owner alone."""
        self.make()
        self.assertEqual(stat.S_IMODE(self.folder.stat().st_mode), 0o755)

    def test_a_tilde_is_the_home_folder(self):
        with (
            mock.patch.dict(os.environ, HOME=str(self.parent)),
            contextlib.chdir(self.create_tempdir().full_path),
            new_folder.new_folder("~/out"),
        ):
            pass
        self.assertTrue(self.folder.is_dir())

    def test_the_tilde_of_nobody_stays(self):
        with contextlib.chdir(self.parent), new_folder.new_folder("~nobody-has-this/x"):
            pass
        self.assertEqual(self.names(), ["~nobody-has-this"])

    def test_the_next_writer_removes_the_files_of_a_killed_process(self):
        killed = []
        for _ in range(2):
            child, partial = self.start_writer()
            child.kill()
            child.wait()
            killed.append(partial)
            self.assertEqual(self.names(), [partial])  # the previous one was removed
        with self.assertLogs(level="WARNING") as logs:
            self.make()
        self.assertIn(f"{killed[1]}, which a killed process", "".join(logs.output))
        self.assertEqual(self.names(), ["out"])
        files = [path.name for path in self.folder.iterdir()]
        self.assertEqual(files, ["whole"])  # without the lock

    def test_a_folder_of_a_running_process_stays(self):
        _, partial = self.start_writer()
        with self.assertRaisesRegex(config_lib.InputError, f"is writing .*{partial}"):
            self.make()
        self.assertEqual(self.names(), [partial])
        self.assertTrue((self.parent / partial / "half").exists())

    @parameterized.named_parameters(
        ("of_another_folder", "out2.partial-abcdefgh", True, False),
        ("somebodys_copy", "out.partial-copy", True, False),
        ("without_a_lock", "out.partial-abcdefgh", False, True),
    )
    def test_folders_of_others_stay(self, name, has_lock, is_named):
        other = self.parent / name
        other.mkdir()
        if has_lock:
            (other / new_folder._LOCK).touch()
        if is_named:
            with self.assertLogs(level="WARNING") as logs:
                self.make()
            self.assertIn(f"Delete {other} if no process", "".join(logs.output))
        else:
            self.make()
        self.assertEqual(self.names(), sorted([name, "out"]))

    def test_without_locks_nothing_is_removed(self):
        child, partial = self.start_writer()
        child.kill()
        child.wait()
        refused = mock.patch("fcntl.flock", side_effect=OSError(37, "No locks"))
        with refused, self.assertLogs(level="WARNING"):
            self.make()
        self.assertEqual(self.names(), ["out", partial])

    def test_a_failure_leaves_nothing(self):
        with (
            self.assertRaises(ZeroDivisionError),
            new_folder.new_folder(self.folder) as partial,
        ):
            (partial / "half").write_text(str(1 // 0))
        self.assertEqual(self.names(), [])

    def test_a_failure_is_not_hidden_by_what_became_of_the_folder(self):
        with (
            self.assertRaises(ZeroDivisionError),
            new_folder.new_folder(self.folder) as partial,
        ):
            shutil.rmtree(partial)
            raise ZeroDivisionError

    def test_folders_above_it_are_made(self):
        self.folder = self.parent / "new" / "deep" / "out"
        self.make()
        self.assertTrue((self.folder / "whole").exists())

    def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(self):
        """By another writer, which takes it for a dead one's."""
        flock, locks = fcntl.flock, []

        def late(lock, kind):
            if not locks:
                shutil.rmtree(pathlib.Path(lock.name).parent)
            locks.append(lock)
            flock(lock, kind)

        with mock.patch.object(fcntl, "flock", late):
            self.make()
        self.assertEqual(self.names(), ["out"])
        self.assertEqual([lock.closed for lock in locks], [True, True])

    def test_never_overwrites(self):
        self.make()
        with self.assertRaisesRegex(config_lib.InputError, "exists"):
            self.make()


if __name__ == "__main__":
    environment.main()
