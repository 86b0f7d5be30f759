"""Mining: what becomes a task, what does not, and runs that are interrupted."""

import asyncio
import json
import os
import pathlib
import tarfile
import tempfile
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.environments.worlds.swe import (
    command,
    mine,
    records,
    sources,
    trials,
)
from tests import environment
from tests.environments.worlds.swe import packages


class RecipeTest(parameterized.TestCase):
    def test_a_missing_toolchain_ends_only_what_could_not_be_tried(self):
        """A package with failing tests in C, and some in Ruby, which is not here."""
        tried, lacking = "its tests fail", "ruby is not in /usr/bin; install ruby"
        recipes = {"c": "", "ruby": lacking}
        found = [mock.Mock(language=language) for language in recipes]
        attempt = mock.AsyncMock(return_value=mine.Failed(tried))
        with (
            mock.patch.object(mine.recipes, "candidates", return_value=found) as given,
            mock.patch.object(
                mine.drivers, "missing", side_effect=lambda r: recipes[r.language]
            ),
            mock.patch.object(mine, "attempt", attempt),
        ):
            package = mock.Mock(files={})
            self.assertEqual(asyncio.run(mine.find_recipe(package, 1.0)), tried)
            given.return_value = found[1:]
            with self.assertRaisesRegex(config.InputError, "ruby need more"):
                asyncio.run(mine.find_recipe(package, 1.0))


class FetchTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "asides",
            "echo 'ERROR: no such version' >&2; echo 'WARNING: an old pip' >&2; exit 1",
            "ERROR: no such version$",
        ),
        ("silence", "exit 3", "returned non-zero exit status 3"),
        ("time", "echo late >&2; sleep 9", "timed out"),
    )
    def test_a_failure_tells_its_reason(self, script, reason):
        if "sleep" in script:
            self.enterContext(mock.patch.object(sources, "_SECONDS", 0.5))
        with self.assertRaisesRegex(config.InputError, f"a==1 was not .*{reason}"):
            sources._run(["sh", "-c", script], "a==1")

    def test_pip_which_runs_code_of_a_package_gets_no_keys(self):
        given = {"GLM5_JAX_API_KEY": "k", "HF_TOKEN": "t", "PIP_INDEX_URL": "i"}
        with (
            mock.patch.dict(os.environ, {**given, "https_proxy": "p"}),
            mock.patch.object(sources.subprocess, "run", side_effect=OSError) as run,
            self.assertRaises(config.InputError),
        ):
            sources.fetch("a==1", pathlib.Path(self.create_tempdir().full_path))
        found = run.call_args.kwargs["env"]
        self.assertContainsSubset({"PATH", "PIP_INDEX_URL", "https_proxy"}, found)
        self.assertNoCommonElements({"GLM5_JAX_API_KEY", "HF_TOKEN"}, found)

    def test_no_file_of_a_package_is_written_outside_its_folder(self):
        top = pathlib.Path(self.create_tempdir().full_path)
        outside, kept = top / "outside", top / "pypi" / "counts-1.0"
        kept.mkdir(parents=True)
        with tarfile.open(kept / "counts-1.0.tar.gz", "w:gz") as tar:
            for name in ("counts.py", str(outside), "a/../../x"):
                tar.addfile(tarfile.TarInfo(name))
        package = sources.fetch("counts==1.0", top)
        self.assertEqual(list(package.files), ["counts.py"])
        folder = records.Folder(top / "tasks")
        for path in (str(outside), "../../../outside", "", "."):
            with self.assertRaisesRegex(config.InputError, "counts has a file .*below"):
                folder.add_tree("counts", {"a.py": b"", path: b"x"})
        self.assertFalse(outside.exists())
        self.assertFalse(folder.path.exists())


@unittest.skipIf(packages.MISSING, packages.MISSING)
class MineTest(parameterized.TestCase):
    def test_tests_tell_what_a_break_does(self):
        """A run by hand of both trees has the outcomes that the record names."""
        folder = packages.folder()
        record = folder.records()[0]
        hidden = folder.hidden_tree(record)
        self.assertEqual(list(hidden), ["tests/test_counts.py"])
        self.assertNotIn("tests/test_counts.py", folder.agent_tree(record))
        for tree, failing in (
            (folder.agent_tree(record), set(record.FAIL_TO_PASS)),
            (folder.solved_tree(record), set()),
        ):
            trial = asyncio.run(trials.run({**tree, **hidden}, record.recipe))
            everything = {*record.FAIL_TO_PASS, *record.PASS_TO_PASS}
            self.assertEqual(trial.problem, "")
            self.assertEqual(everything - trial.passed(), failing)
        self.assertEqual(
            folder.solved_tree(record)["counts.py"], packages.SOURCE.encode()
        )

    def test_tests_that_a_set_names_have_the_same_names_in_every_run(self):
        """As parametrize({...}) of pytest does: hashes of texts are not random."""
        tests = (
            "import unittest\n"
            "class SetTest(unittest.TestCase): pass\n"
            "for i, name in enumerate(set('abcdefghijklmnopqrstuvwxyz')):\n"
            "    setattr(SetTest, f'test_{i}_{name}', lambda self: None)\n"
        )
        files = {**packages.FILES, "tests/test_counts.py": tests.encode()}
        recipe = packages.folder().records()[0].recipe
        one, two = (asyncio.run(trials.run(files, recipe)) for _ in range(2))
        self.assertLen(one.passed(), 26)
        self.assertEqual(one.passed(), two.passed())

    def test_every_candidate_has_an_outcome(self):
        counts = mine.Log(packages.folder()).counts(of_packages=False)
        self.assertEqual(counts[mine.MADE], len(packages.folder().records()))
        known = {mine.MADE, "no test fails", "most tests fail", "out of time"}
        self.assertEmpty(set(counts) - known)

    def test_an_interrupted_run_resumes(self):
        whole = packages.folder()
        with tempfile.TemporaryDirectory() as name:
            folder = records.Folder(name)
            for size in (1, 3):  # as if it had ended after one task
                log = mine.Log(folder)
                log.outcomes.pop(("counts-1.0", ""), None)
                lines = [x for x in _lines(log) if '"candidate": ""' not in x]
                pathlib.Path(name, mine.LOG).write_text("".join(lines))
                asyncio.run(mine.mine(packages.package(), folder, size, seed=0))
            ids = [record.instance_id for record in folder.records()]
        self.assertLen(set(ids), len(ids))
        self.assertEqual(ids, [record.instance_id for record in whole.records()])

    @parameterized.named_parameters(
        ("no_tests", {"counts.py": b"x = 1\n"}, "no tests that a rule finds"),
        (
            "too_few",
            {"tests/test_a.py": b"import unittest\nclass T(unittest.TestCase):\n"
             b"    def test_a(self): pass\n"},
            "hardly any test passes",
        ),
    )  # fmt: skip
    def test_packages_that_give_no_task_say_why(self, files, reason):
        found = asyncio.run(mine.find_recipe(packages.package(files=files)))
        self.assertEqual(found, reason)

    def test_the_command_tells_the_yield(self):
        with tempfile.TemporaryDirectory() as name:
            source = pathlib.Path(name, "counts")
            for path, content in packages.FILES.items():
                (source / path).parent.mkdir(parents=True, exist_ok=True)
                (source / path).write_bytes(content)
            out = f"{name}/out"
            *_, last = command.run(str(source), out, num_tasks=1, seed=0)
            *_, again = command.run(str(source), out, num_tasks=1, seed=0)
        told = json.loads(last)
        self.assertEqual(told["tasks"], 1)
        (row,) = told["by_package"].values()
        self.assertEqual((row["tasks"], row["package"]), (1, "tests run (python)"))
        self.assertEqual(row["tried"], sum(told["candidates"].values()))
        self.assertEqual(last, again)


def _lines(log):
    path = log._path
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


if __name__ == "__main__":
    environment.main()
