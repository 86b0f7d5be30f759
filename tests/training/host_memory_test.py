"""Memory of the host: large pages for a step, and its return to the system."""

import os
import pathlib
import subprocess
import sys

from absl.testing import absltest, parameterized

from glm5_jax.training.run import host_memory
from tests import environment

ROOT = pathlib.Path(__file__).parent.parent.parent
PROGRAM = """
import os, sys
from glm5_jax.training.run import host_memory
print("started", flush=True)
host_memory.restart_with_large_pages()
print(os.environ["GLIBC_TUNABLES"], *sys.argv[1:])
"""


@absltest.skipUnless(sys.platform.startswith("linux"), "glibc is Linux's")
class RestartTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("once", None, ["started", "started", "glibc.malloc.hugetlb=1 --flag x"]),
        (
            "users_own",
            "glibc.malloc.check=0",
            ["started", "glibc.malloc.check=0 --flag x"],
        ),
    )
    def test_keeps_the_arguments(self, tunables, expected):
        environ = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
        environ |= {"GLIBC_TUNABLES": tunables} if tunables else {}
        script = self.create_tempfile("program.py", PROGRAM).full_path
        done = subprocess.run(
            [sys.executable, script, "--flag", "x"],
            env=environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertEqual(done.stdout.splitlines(), expected)


class PeakTest(absltest.TestCase):
    def test_is_that_of_a_python_with_jax(self):
        host_memory.trim()
        self.assertBetween(host_memory.peak_gib(), 0.01, 1000)


if __name__ == "__main__":
    environment.main()
