"""A folder of a process is deleted after it, however it ends."""

import pathlib
import subprocess
import sys
import time

from absl.testing import parameterized

from tests import environment
from tests.processes import launch

PROGRAM = """
import os, signal, sys

from glm5_jax.processes import own_folder

made = own_folder.OwnFolder("own_", sys.argv[1])
(made.path / "weights").mkdir()
(made.path / "weights" / "file").write_bytes(bytes(1000))
print(made.path, flush=True)
{end}
"""


class OwnFolderTest(parameterized.TestCase):
    @parameterized.parameters(
        "os._exit(1)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.killpg(os.getpid(), signal.SIGINT)",
        "sys.exit()",
        "made.close(); print(not made.path.exists()); made.close()",
        # What stops a service also signals its other processes, as they start or later.
        "os.kill(made._deleter.pid, signal.SIGTERM); os._exit(1)",
        "os.kill(made._deleter.pid, signal.SIGKILL); made.close(); print(True)",
    )
    def test_it_lasts_as_long_as_the_process(self, end):
        root = self.create_tempdir().full_path
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(end=end), root],
            cwd=launch.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        path, *said = done.stdout.split()
        self.assertIn(said, ([], ["True"]))
        self.assertEqual(pathlib.Path(path).parent, pathlib.Path(root))
        deadline = time.monotonic() + 30
        while pathlib.Path(path).exists():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)


if __name__ == "__main__":
    environment.main()
