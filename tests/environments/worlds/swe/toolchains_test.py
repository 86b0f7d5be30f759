"""Ruby, PHP, Java and Go: recipes of small packages, and runs where they are installed.

Each package has a function that adds, which is right, and one that takes away, which is
broken; so one run shows both outcomes.
"""

import asyncio
import dataclasses
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
    sources,
    statements,
    trials,
    world,
)
from tests.environments.worlds.swe import packages

RUBY = """module Sums
  def self.add(a, b)
    a + b
  end

  def self.take(a, b)
    a + b
  end
end
"""
RUBY_TEST = """require 'minitest/autorun'
require 'sums'

class SumsTest < Minitest::Test
  def test_add
    assert_equal 3, Sums.add(1, 2)
  end

  def test_take
    assert_equal 3, Sums.take(5, 2)
  end

  def test_none
    assert_equal 0, Sums.add(0, 0)
  end
end
"""
PHP = """<?php
namespace Own\\Sums;

class Sums
{
    public static function add($a, $b)
    {
        return $a + $b;
    }

    public static function take($a, $b)
    {
        return $a + $b;
    }
}
"""
PHP_TEST = """<?php
namespace Own\\Sums\\Tests;

use Own\\Sums\\Sums;

class SumsTest extends Base
{
    public function testAdd()
    {
        $this->assertSame(3, Sums::add(1, 2));
    }

    public function testTake()
    {
        $this->assertSame(3, Sums::take(5, 2));
    }

    public function testNone()
    {
        $this->assertSame(0, Sums::add(0, 0));
    }
}
"""
PHP_BASE = """<?php
namespace Own\\Sums\\Tests;

abstract class Base extends \\PHPUnit\\Framework\\TestCase
{
}
"""
JAVA = """package own.cli;

public class Sums {
    public static int add(int a, int b) {
        return a + b;
    }

    public static int take(int a, int b) {
        return a + b;
    }
}
"""
JAVA_TEST = """package own.cli;

import static org.junit.Assert.assertEquals;
import org.junit.Test;

public class SumsTest {
    @Test public void add() {
        assertEquals(3, Sums.add(1, 2));
    }

    @Test public void take() {
        assertEquals(3, Sums.take(5, 2));
    }

    @Test public void none() {
        assertEquals(0, Sums.add(0, 0));
    }
}
"""
GO = """package sums

func Add(a, b int) int {
\treturn a + b
}

func Take(a, b int) int {
\treturn a + b
}
"""
GO_TEST = """package sums

import "testing"

func TestAdd(t *testing.T) {
\tif Add(1, 2) != 3 {
\t\tt.Error("1 + 2")
\t}
}

func TestTake(t *testing.T) {
\tif got := Take(5, 2); got != 3 {
\t\tt.Errorf("5 - 2 = %d", got)
\t}
}

func TestNone(t *testing.T) {
\tif Add(0, 0) != 0 {
\t\tt.Error("0 + 0")
\t}
}
"""
COMPOSER = '{"autoload": {"psr-4": {"Own\\\\Sums\\\\": "code/"}}}'


@dataclasses.dataclass(frozen=True)
class Sample:
    """A package, where it is broken, its tests' names, and what its failure shows."""

    files: dict[str, str]
    broken: str
    tests: tuple[str, str, str]  # the second one fails
    shown: tuple[str, ...]


SAMPLES = {
    "ruby": Sample(
        {"lib/sums.rb": RUBY, "test/sums_test.rb": RUBY_TEST},
        "lib/sums.rb",
        tuple(f"test/sums_test.rb::SumsTest#test_{x}" for x in ("add", "take", "none")),
        (">>> assert_equal 3, Sums.take(5, 2)\nExpected: 3\n  Actual: 7",),
    ),
    "php": Sample(
        {
            "composer.json": COMPOSER,
            "code/Sums.php": PHP,
            "tests/Base.php": PHP_BASE,
            "tests/SumsTest.php": PHP_TEST,
        },
        "code/Sums.php",
        tuple(
            f"tests/SumsTest.php::Sums (Own\\Sums\\Tests\\Sums): {x}"
            for x in ("Add", "Take", "None")
        ),
        ("7 is identical to 3", ">>> $this->assertSame(3, Sums::take(5, 2));"),
    ),
    "java": Sample(
        {
            "src/main/java/own/cli/Sums.java": JAVA,
            "src/test/java/own/cli/SumsTest.java": JAVA_TEST,
        },
        "src/main/java/own/cli/Sums.java",
        tuple(f"tests::{x}(own.cli.SumsTest)" for x in ("add", "take", "none")),
        ("expected:<3> but was:<7>", ">>> assertEquals(3, Sums.take(5, 2));"),
    ),
    "go": Sample(
        {"go.mod": "module own.org/sums\n", "sums.go": GO, "sums_test.go": GO_TEST},
        "sums.go",
        tuple(f"tests::Test{x}" for x in ("Add", "Take", "None")),
        ("5 - 2 = 7",),
    ),
}
CASES = [(language, language) for language in SAMPLES]


def recipe_of(language):
    (found,) = recipes.candidates(files_of(language))
    return found


def files_of(language):
    return {path: text.encode() for path, text in SAMPLES[language].files.items()}


def solved(language):
    """Returns the files without the fault."""
    files, path = files_of(language), SAMPLES[language].broken
    head, _, tail = files[path].rpartition(b" + ")
    return {**files, path: head + b" - " + tail}


class RecipesTest(parameterized.TestCase):
    @parameterized.named_parameters(*CASES)
    def test_tests_and_sources_are_told_apart(self, language):
        found, files = recipe_of(language), files_of(language)
        self.assertEqual(found.language, language)
        tests = {path for path in files if "est" in path}
        self.assertEqual(set(recipes.hidden(files, found)), tests)
        self.assertEqual(recipes.sources(files, found), [SAMPLES[language].broken])

    @parameterized.parameters(
        ("ruby", "lib/minitest/autorun.rb"),
        ("php", "composer.json"),
        ("php", "src/PHPUnit/Framework/TestCase.php"),
        ("java", "src/main/java/org/junit/Assert.java"),
        ("go", "go.mod"),
        ("go", "vendor/testing/testing.go"),
        ("go", "more_test.go"),
    )
    def test_files_that_steer_a_run_are_guarded(self, language, path):
        self.assertTrue(recipes.is_guarded(path, recipe_of(language)))

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


def lacking(language):
    return packages.MISSING or drivers.missing(recipe_of(language))


class RunsTest(parameterized.TestCase):
    def run_of(self, language, files):
        if reason := lacking(language):
            self.skipTest(reason)
        return asyncio.run(trials.run(files, recipe_of(language), 120.0))

    @parameterized.named_parameters(*CASES)
    def test_outcomes_and_what_an_issue_shows(self, language):
        files, sample = files_of(language), SAMPLES[language]
        trial = self.run_of(language, files)
        good, bad, other = sample.tests
        self.assertEqual(trial.problem, "", trial.log)
        self.assertEqual(
            {k: v for k, v in trial.outcomes.items() if "::" in k},
            {good: "passed", bad: "failed", other: "passed"},
        )
        self.assertGreater(trial.cpu_seconds, 0.0)
        patch = diffs.make(files, solved(language))
        told = (language, trial.log, "", patch, sample.tests, files)
        statement = statements.write("sums", *told)
        for text in sample.shown:
            self.assertIn(text, statement)
        self.assertNotIn("(a + b)", statement)
        self.assertNotIn("Take]", statement)


class ProofTest(parameterized.TestCase):
    def prove(self, language):
        """Mines the fault's mending as a task, and proves it with every cheat."""
        if reason := lacking(language):
            self.skipTest(reason)
        folder = records.Folder(self.create_tempdir().full_path)
        package = sources.Package("sums", "1", "test:sums", solved(language))
        path = SAMPLES[language].broken
        broken = {path: SAMPLES[language].files[path]}

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
        self.assertIn(SAMPLES[language].tests[1], record.FAIL_TO_PASS)
        self.assertIn(SAMPLES[language].tests[0], record.PASS_TO_PASS)
        self.assertEmpty(proof.failures)
        self.assertGreater(proof.num_episodes, 4)

    @parameterized.named_parameters(("ruby", "ruby"), ("php", "php"))
    def test_a_task_is_proven(self, language):
        self.prove(language)

    @parameterized.named_parameters(("java", "java"), ("go", "go"))
    @pytest.mark.slow
    def test_a_compiled_task_is_proven(self, language):
        self.prove(language)


if __name__ == "__main__":
    absltest.main()
