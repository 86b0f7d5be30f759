"""The files of token ids of generate and evaluate."""

import pathlib
import pickle
import shutil
import subprocess
import sys
import unittest

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.inference import id_files
from tests import environment

FULL_DISK = """
import os
from glm5_jax.inference import id_files
for write in (
    lambda: id_files.save_rows("ids", [[1] * 99_999], 0, True),
    lambda: id_files.room_for_logits("logits", (1, 99, 999)),
):
    try:
        write()
    except OSError as error:
        print(error.errno, error)
fits = id_files.room_for_logits("fits", (1, 3, 5))
print(fits.shape, fits.sum())
print(sorted(os.listdir()))
"""


class Touch:
    """Makes a file as it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


class IdFilesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.path = str(self.folder / "ids.npy")

    @parameterized.parameters(((4,),), ((2, 3),))
    def test_rows_and_single_rows_are_read(self, shape):
        ids = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
        np.save(self.path, ids)
        np.testing.assert_array_equal(id_files.read_ids(self.path), ids)

    @parameterized.named_parameters(
        ("none", np.zeros((2, 0), int), r"got int64\[2, 0\]"),
        ("number", np.array(5), r"got int64\[\]"),
        ("floats", np.ones(3), r"got float64\[3\]"),
        ("cube", np.ones((1, 2, 3), int), r"got int64\[1, 2, 3\]"),
    )
    def test_other_arrays_are_refused(self, array, message):
        np.save(self.path, array)
        with self.assertRaisesRegex(config_lib.InputError, message):
            id_files.read_ids(self.path)

    def test_an_archive_is_refused(self):
        with open(self.path, "wb") as file:
            np.savez(file, ids=np.arange(3))
        with self.assertRaisesRegex(config_lib.InputError, "got an .npz"):
            id_files.read_ids(self.path)

    def test_no_program_in_a_file_is_run(self):
        mark = self.folder / "mark"
        pathlib.Path(self.path).write_bytes(pickle.dumps(Touch(mark)))
        with self.assertRaisesRegex(config_lib.InputError, "cannot be read"):
            id_files.read_ids(self.path)
        self.assertFalse(mark.exists())

    def test_shorter_rows_are_padded(self):
        id_files.save_rows(self.path, [[1, 2, 3], [4], [5, 6]], 9, False)
        wanted = [[1, 2, 3], [4, 9, 9], [5, 6, 9]]
        np.testing.assert_array_equal(np.load(self.path), wanted)
        id_files.save_rows(self.path, [[1, 2]], 9, True)
        np.testing.assert_array_equal(np.load(self.path), [1, 2])

    @unittest.skipIf(shutil.which("bwrap") is None, "needs bubblewrap")
    def test_a_full_disk_keeps_no_part_of_a_result(self):
        """A disk of 64 KiB. Logits without blocks would end the process by SIGBUS."""
        words = ("--size", "65536", "--tmpfs", "/mnt", "--chdir", "/mnt")
        box = ("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc")
        command = [*box, *words, sys.executable, "-c", FULL_DISK]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(found.returncode, 0, found.stderr)
        ids, logits, fits, left = found.stdout.splitlines()
        for line, name in ((ids, "ids"), (logits, "logits")):
            self.assertRegex(line, rf"^28 .*{name} cannot be written \(.*(ed|space)")
        self.assertEqual((fits, left), ("(1, 3, 5) 0.0", "['fits']"))

    def test_a_device_that_cannot_be_written_stays(self):
        with self.assertRaisesRegex(OSError, "/dev/full cannot be written"):
            id_files.save_rows("/dev/full", [[1] * 99], 0, True)
        self.assertTrue(pathlib.Path("/dev/full").exists())

    def test_a_place_for_a_result(self):
        id_files.require_folder_of(None)
        id_files.require_folder_of(self.path)
        for path, message in (
            (self.folder / "no" / "x", "does not exist"),
            (self.folder, "is a folder"),
        ):
            with self.assertRaisesRegex(config_lib.InputError, message):
                id_files.require_folder_of(str(path))


if __name__ == "__main__":
    environment.main()
