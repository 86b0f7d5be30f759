"""Languages and runners: recipes of small packages, and runs where they are installed.

Tests with unittest, which packages.py has, run in other files.
"""

import asyncio
import dataclasses
import os
import pathlib
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.environments import proofs
from glm5_jax.environments.worlds.swe import (
    diffs,
    drivers,
    mine,
    recipes,
    records,
    runners,
    sources,
    statements,
    trials,
    world,
)
from tests.environments.worlds.swe import packages
from tests.environments.worlds.swe.samples import (
    EVERY,
    JAVA,
    JAVA_TEST,
    NPM_SAMPLES,
    SAMPLES,
)

CASES = [(name, name) for name in SAMPLES]
NPM_CASES = [(name, name) for name in NPM_SAMPLES]


def recipe_of(language):
    found, *others = recipes.candidates(files_of(language))
    assert language in NPM_SAMPLES or not others
    return found


def files_of(language):
    return {path: text.encode() for path, text in EVERY[language].files.items()}


def solved(language):
    """Returns the files without the fault."""
    files, path = files_of(language), EVERY[language].broken
    head, _, tail = files[path].rpartition(b" + ")
    return {**files, path: head + b" - " + tail}


class RecipesTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES, *NPM_CASES)
    def test_tests_and_sources_are_told_apart(self, language):
        found, files = recipe_of(language), files_of(language)
        self.assertEqual(found.language, EVERY[language].language)
        tests = {path for path in files if "est" in path}
        self.assertEqual(set(recipes.hidden(files, found)), tests)
        self.assertEqual(recipes.sources(files, found), [EVERY[language].broken])

    @parameterized.parameters(
        ("ruby", "lib/minitest/autorun.rb"),
        ("php", "composer.json"),
        ("php", "src/PHPUnit/Framework/TestCase.php"),
        ("java", "src/main/java/org/junit/Assert.java"),
        ("go", "go.mod"),
        ("go", "vendor/testing/testing.go"),
        ("go", "more_test.go"),
        ("c", "sums.o"),
        ("c", "unity/unity.c"),
        ("c", "unity_internals.h"),
        ("c++", "libsums.a"),
        ("pytest", "conftest.py"),
        ("pytest", "own/conftest/__init__.py"),
        ("pytest", "src/test_sums/__init__.py"),
        ("perl", "lib/Test/More.pm"),
        ("perl", "lib/Test2/API.pm"),
        ("perl", "lib/Test2.pm"),
        ("perl", "lib/Test.pm"),
        ("javascript", "more.test.js"),
        ("mocha", "node_modules/chai/index.js"),
        ("mocha", ".mocharc.json"),
        ("typescript", "tsconfig.json"),
    )
    def test_files_that_steer_a_run_are_guarded(self, language, path):
        self.assertTrue(recipes.is_guarded(path, recipe_of(language)))

    def test_new_headers_of_the_compilers_names_are_not_taken(self):
        if reason := lacking("c"):
            self.skipTest(reason)
        for language in ("c", "c++"):
            for path in ("assert.h", "src/features.h", "assert.h.gch/x", "stddef.h"):
                self.assertFalse(recipes.is_taken(path, recipe_of(language), ()), path)
            for path in ("assert.h", "src/features.h"):  # the package's own
                self.assertTrue(recipes.is_taken(path, recipe_of(language), [path]))
            self.assertTrue(recipes.is_taken("own.h", recipe_of(language), ()))
        self.assertTrue(recipes.is_taken("assert.h", recipe_of("perl"), ()))

    def test_a_framework_of_c_is_compiled_once_and_not_broken(self):
        files = {**files_of("c"), "unity/unity.c": b"int fails;\n"}
        (found,) = recipes.candidates(files)
        self.assertEqual(found.sources.count("unity/unity.c"), 1)
        self.assertNotIn("unity/unity.c", recipes.sources(files, found))

    def test_everyone_may_read_a_runner_whatever_the_umask(self):
        self.addCleanup(os.umask, os.umask(0o077))
        folder = runners.folder.__wrapped__("pytest")
        for path in (folder, *folder.rglob("*")):
            mode = path.stat().st_mode
            self.assertEqual(mode & 0o004, 4, path)

    def test_helpers_of_tests_are_no_tests(self):
        files = {**files_of("ruby"), "test/test_helper.rb": b"", "spec/a_test.rb": b""}
        (found,) = recipes.candidates(files)
        self.assertEqual(found.files, ("spec/a_test.rb", "test/sums_test.rb"))
        self.assertEqual(found.roots, ("lib", "spec", "test", "."))
        (found,) = recipes.candidates(files_of("php"))
        self.assertEqual(found.files, ("tests/SumsTest.php",))

    def test_java_of_an_older_layout(self):
        files = {
            "src/own/Sums.java": JAVA.encode(),
            "test/own/SumsTest.java": JAVA_TEST.encode(),
            "test/own/AllTests.java": b"abstract class X { org.junit.Test x; }",
        }
        (found,) = recipes.candidates(files)
        self.assertEqual(found.roots, ("src", "test"))
        self.assertEqual(found.files, ("test/own/SumsTest.java",))

    def test_php_without_its_own_map_of_classes(self):
        self.assertIn("'Own\\Sums\\Sums'", recipe_of("php").canary)

    def test_a_missing_toolchain_is_named(self):
        package = sources.Package("sums", "1", "test", files_of("go"))
        with (
            mock.patch.object(drivers.shutil, "which", return_value=None),
            self.assertRaisesRegex(config.InputError, "sums: .* install golang-go"),
        ):
            asyncio.run(mine.find_recipe(package))
        with (
            mock.patch.object(drivers.shutil, "which", return_value=None),
            self.assertRaisesRegex(config.InputError, "php cannot run: .*phpunit"),
        ):
            asyncio.run(trials.run(files_of("php"), recipe_of("php")))

    def test_a_compiler_without_its_framework_is_named(self):
        """Debian's JDK comes without JUnit."""
        with (
            mock.patch.object(drivers.shutil, "which", return_value="/usr/bin/javac"),
            mock.patch.dict(drivers._INSTALLED, junit=("/nowhere/junit4.jar",)),
        ):
            reason = drivers.missing(recipe_of("java"))
        self.assertRegex(reason, "junit4.jar is missing; install .*junit4")

    def test_every_file_of_the_folder_runner_goes_into_a_box(self):
        recipes_of_all = map(recipe_of, EVERY)
        found = [drivers.files(recipe, "token") for recipe in recipes_of_all]
        brought = {pathlib.Path(path).name for files in found for path in files}
        folder = pathlib.Path(drivers.__file__).parent / "runner"
        names = {path.name for path in folder.iterdir() if path.is_file()}
        self.assertContainsSubset(names, brought)


def lacking(language):
    if missing := packages.MISSING or drivers.missing(recipe_of(language)):
        return missing
    try:  # npm may have no network
        drivers.binds(recipe_of(language))
    except config.InputError as error:
        return str(error)
    return ""


class RunsTest(parameterized.TestCase):
    def run_of(self, language, files, recipe=None):
        if reason := lacking(language):
            self.skipTest(reason)
        recipe = recipe or recipe_of(language)
        return asyncio.run(trials.run(files, recipe, 120.0))

    @parameterized.named_parameters(*NPM_CASES)
    @pytest.mark.slow
    def test_outcomes_of_what_npm_brings(self, language):
        self.check(language)

    @parameterized.named_parameters(*CASES)
    def test_outcomes_and_what_an_issue_shows(self, language):
        self.check(language)

    def check(self, language):
        files, sample = files_of(language), EVERY[language]
        trial = self.run_of(language, files)
        good, bad, other = sample.tests
        self.assertEqual(trial.problem, "", trial.log)
        self.assertEqual(
            {k: v for k, v in trial.outcomes.items() if "::" in k},
            {good: "passed", bad: "failed", other: "passed"},
        )
        self.assertGreater(trial.cpu_seconds, 0.0)
        patch = diffs.make(files, solved(language))
        told = (sample.language, trial.log, "", patch, sample.tests, files)
        statement = statements.write("sums", *told)
        for text in sample.shown:
            self.assertIn(text, statement)
        self.assertNotIn("(a + b)", statement)
        self.assertNotIn("Take]", statement)

    def test_outcomes_of_pytest_and_a_runner_that_is_changed(self):
        """Every way in which a test of pytest ends, and a package that patches it."""
        tests = """import pytest, sums

@pytest.fixture
def broken():
    raise OSError

@pytest.mark.parametrize("x", [1, "two words"])
def test_each(x): assert x
def test_setup(broken): pass
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_hopeless(): assert 0
@pytest.mark.xfail(strict=True)
def test_hopeful(): pass
class TestGroup:
    def test_inside(self): assert sums.take(5, 2) == 7
"""
        name = "tests/test_more.py::test_"
        wanted = {
            f"{name}each[1]": "passed",
            f"{name}each[two words]": "passed",
            f"{name}setup": "failed",
            f"{name}skipped": "skipped",
            f"{name}hopeless": "skipped",
            f"{name}hopeful": "failed",
            "tests/test_more.py::TestGroup::test_inside": "passed",
            "tests/test_syntax.py": "failed",
        }
        files = {
            **files_of("pytest"),
            "tests/test_more.py": tests.encode(),
            "tests/test_syntax.py": b"def test(:",
        }
        recipe = dataclasses.replace(
            recipe_of("pytest"), files=("tests/test_more.py", "tests/test_syntax.py")
        )
        trial = self.run_of("pytest", files, recipe)
        self.assertEqual((trial.problem, trial.outcomes), ("", wanted), trial.log)
        name = "_pytest.python.Function.runtest"
        files["sums.py"] += f"import _pytest.python\n{name} = print\n".encode()
        trial = self.run_of("pytest", files, recipe)
        self.assertEqual(trial.problem, f"the test runner was changed: {name}")
        self.assertEmpty(trial.passed())


class ProofTest(parameterized.TestCase):
    def prove(self, language):
        """Mines the fault's mending as a task, and proves it with every cheat."""
        if reason := lacking(language):
            self.skipTest(reason)
        folder = records.Folder(self.create_tempdir().full_path)
        package = sources.Package("sums", "1", "test:sums", solved(language))
        path = EVERY[language].broken
        broken = {path: EVERY[language].files[path]}

        async def made():
            found = await mine.find_recipe(package)
            self.assertIsInstance(found, mine.Found)
            record = await mine.make_task(found, broken, "sums-1", "release", "0")
            folder.add_tree(package.tree, package.files)
            folder.add(record)
            swe = world.Swe(f"swe:{folder.path}")
            task = swe.task_of(record)
            self.assertEqual(swe.source_of(task), "test:sums")
            return record, await proofs.prove(swe, task, num_repeats=1)

        record, proof = asyncio.run(made())
        self.assertIn(EVERY[language].tests[1], record.FAIL_TO_PASS)
        self.assertIn(EVERY[language].tests[0], record.PASS_TO_PASS)
        self.assertEmpty(proof.failures)
        self.assertGreaterEqual(proof.num_episodes, 4)

    @parameterized.named_parameters(("ruby", "ruby"), ("php", "php"))
    def test_a_task_is_proven(self, language):
        self.prove(language)

    @parameterized.named_parameters(
        *[(name, name) for name in ("java", "go", "c", "c++", "pytest")],
        *[(name, name) for name in ("perl", "javascript", *NPM_SAMPLES)],
    )
    @pytest.mark.slow
    def test_a_compiled_task_is_proven(self, language):
        self.prove(language)


if __name__ == "__main__":
    absltest.main()
