"""Tasks in Harbor's format: what its harness does with them, done here by hand."""

import asyncio
import importlib.util
import os
import pathlib
import subprocess
import sys
import tomllib
import unittest

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import sandbox, validate
from glm5_jax.environments.harbor import folder as harbor
from glm5_jax.environments.sandbox import bubblewrap
from tests import environment

ROOT = pathlib.Path(__file__).resolve().parents[3]
MISSING = bubblewrap.missing()
HAS_HARBOR = importlib.util.find_spec("harbor") is not None
CLASS = "glm5_jax.environments.harbor.environment:Bubblewrap"


def exported(test, name, num_tasks=1):
    """Returns the folders of tasks, which everyone can read."""
    out = pathlib.Path(test.create_tempdir().full_path) / "tasks"
    validate.export(name, "train", 0, num_tasks, out)
    for path in (out, *out.rglob("*"), *out.parents):
        if path.stat().st_uid == os.geteuid() and path != path.parent:
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    return sorted(out.iterdir())


async def graded(task, is_solved):
    """Returns the reward file after the solution, or nothing, and the tests."""
    files = task / "environment" / harbor.FILES
    image = sandbox.Image(folder=files, folders=("/solution", "/tests", "/logs"))
    box = await sandbox.start(image)
    try:
        setup = (task / "environment" / harbor.SETUP).read_text()
        assert (await box.run(setup)).exit_code == 0
        if is_solved:
            await box.write(
                "/solution/solve.sh", (task / "solution/solve.sh").read_bytes()
            )
            await box.run("bash /solution/solve.sh")
        await box.restart()
        await box.write("/tests/test.sh", (task / "tests/test.sh").read_bytes())
        await box.run("cd /; bash /tests/test.sh")
        return float(await box.read(harbor.REWARD))
    finally:
        await box.close()


class FolderTest(parameterized.TestCase):
    def test_the_files_of_a_task(self):
        (task,) = exported(self, "terminal:column_sums")
        toml = tomllib.loads((task / "task.toml").read_text())
        self.assertEqual(toml["schema_version"], "1.4")
        self.assertEqual(toml["environment"]["network_mode"], "no-network")
        self.assertEqual(toml["task"]["keywords"], ["column_sums"])
        self.assertStartsWith(
            (task / "instruction.md").read_text(), "You are in /work."
        )
        self.assertTrue((task / "environment/files/sales.csv").exists())
        for name in ("solution/solve.sh", "tests/test.sh"):
            self.assertTrue(os.access(task / name, os.X_OK))

    @parameterized.parameters("git_revert", "patch_level", "script_words", "cron_line")
    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_the_solution_earns_1_and_nothing_0(self, family):
        (task,) = exported(self, f"terminal:{family}")
        self.assertEqual(asyncio.run(graded(task, is_solved=True)), 1)
        self.assertEqual(asyncio.run(graded(task, is_solved=False)), 0)

    def test_what_cannot_be_exported_is_said(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        with self.assertRaisesRegex(config.InputError, "no tasks in Harbor's format"):
            validate.export("gcd", "train", 0, 1, folder / "a")
        with self.assertRaisesRegex(config.InputError, "--out is missing"):
            validate.export("terminal", "train", 0, 1, None)
        (folder / "file").touch()
        with self.assertRaisesRegex(config.InputError, "is not empty"):
            validate.export("terminal", "train", 0, 1, folder)


@unittest.skipUnless(HAS_HARBOR, "harbor, which needs Python 3.12, is not installed")
class HarnessTest(parameterized.TestCase):
    @parameterized.parameters(("oracle", "1.0"), ("nop", "0.0"))
    def test_harbor_runs_tasks_in_our_sandbox(self, agent, reward):
        tasks = exported(self, "terminal", len(environments.make("terminal").families))
        script = pathlib.Path(sys.executable).parent / "harbor"
        command = [script, "run", "-p", tasks[0].parent, "-a", agent, "-n", "4"]
        command += ["--environment-import-path", CLASS]
        command += ["-o", self.create_tempdir().full_path]
        environ = {"HARBOR_TELEMETRY": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            command,
            env={**os.environ, **environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertRegex(done.stdout, rf"{reward} +│ +{len(tasks)} ")


if __name__ == "__main__":
    environment.main()
