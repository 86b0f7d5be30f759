"""Tasks of software engineering as folders of Harbor's format, played by its world."""

import asyncio
import json
import os
import pathlib
import unittest
from unittest import mock

import pytest
from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, tool_calls, validate
from glm5_jax.environments.worlds.swe import copies, mine, records, sources, world
from tests import environment
from tests.environments import episodes
from tests.environments.worlds.swe import packages, toolchains_test
from tests.environments.worlds.swe.samples import EVERY


@unittest.skipIf(packages.MISSING, packages.MISSING)
class ExportTest(parameterized.TestCase):
    def exported(self, folder, num_tasks=1):
        """Returns the taskset of the folders that a command would write."""
        self.out = pathlib.Path(self.create_tempdir().full_path) / "out"
        name = f"swe:{folder.path}"
        split = "train" if world.Swe(name).size("train") else "held_out"
        validate.export(name, split, 0, num_tasks, self.out)
        return environments.make(f"harbor:{self.out}")

    def test_the_solution_earns_1_and_nothing_0(self):
        made = self.exported(packages.folder(), num_tasks=1)
        ((task_id, read),) = made.by_id.items()
        folder = packages.folder()
        (record,) = [r for r in folder.records() if r.instance_id == task_id]
        task = made.task_of(read)
        submit = tool_calls.turn(tool_calls.SUBMIT)
        right = episodes.demonstrated(made, task)
        self.assertEqual(episodes.play(made, task, *right)[-1].reward.total, 1.0)
        (nothing,) = episodes.play(made, task, submit)
        self.assertEqual(nothing.reward.total, 0.0)
        self.assertRegex(nothing.info["output"], r"\d of 4 tests pass\.")

        self.assertEqual((read.workdir, read.settings.tag), ("/work/repo", "python"))
        self.assertIn(record.problem_statement, read.instruction)
        self.assertIn("hidden/tests/test_counts.py", read.tests)
        files = self.out / task_id / "environment/files"
        found = {p.name for p in files.rglob("*") if p.is_file()}
        self.assertEqual(found, {"counts.py"})
        told = json.loads(read.tests["task.json"])
        self.assertEqual(told["FAIL_TO_PASS"], list(record.FAIL_TO_PASS))
        self.assertTrue(os.access(self.out / task_id / "solution/solve.sh", os.X_OK))

    def test_a_split_is_written_once(self):
        made = self.exported(packages.folder(), num_tasks=100)
        size = max(map(world.Swe(f"swe:{packages.folder().path}").size, made._names))
        self.assertLessEqual(len(made.by_id), size)

    def test_what_a_folder_cannot_hide_is_not_written(self):
        found = (pathlib.Path("/usr/lib/counts.py"),)
        with (
            mock.patch.object(copies, "on_host", return_value=found),
            self.assertLogs(level="WARNING") as logged,
            self.assertRaisesRegex(config.InputError, "no task of .* was written"),
        ):
            self.exported(packages.folder())
        self.assertIn("/usr/lib/counts.py has its solution", "".join(logged.output))

    @parameterized.named_parameters(*[(name, name) for name in EVERY])
    @pytest.mark.slow
    def test_a_folder_is_proven(self, language):
        """With the cheats of the world of software engineering, and Harbor's."""
        if reason := toolchains_test.lacking(language):
            self.skipTest(reason)
        folder = records.Folder(self.create_tempdir().full_path)
        solved = toolchains_test.solved(language)
        package = sources.Package("sums", "1", "test:sums", solved)
        path = EVERY[language].broken
        broken = {path: EVERY[language].files[path]}

        async def record():
            found = await mine.find_recipe(package, 60.0)
            return await mine.make_task(found, broken, "sums-1", "release", "0")

        folder.add_tree(package.tree, package.files)
        folder.add(asyncio.run(record()))
        made = self.exported(folder)
        (task,) = map(made.task_of, made.by_id.values())
        proof = asyncio.run(proofs.prove(made, task, num_repeats=1))
        self.assertEmpty(proof.failures)
        self.assertGreaterEqual(proof.num_episodes, 1 + 1 + 5 + 1)


if __name__ == "__main__":
    environment.main()
