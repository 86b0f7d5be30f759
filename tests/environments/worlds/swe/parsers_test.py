"""Logs of real tools, as they are written, and programs that are run here."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from absl.testing import parameterized

from glm5_jax.environments.worlds.swe import parsers
from tests import environment

SUITE = """import unittest
class OfTest(unittest.TestCase):
    def test_good(self):
        "Has a docstring."
    def test_bad(self):
        self.assertEqual(1, 2)
    def test_error(self):
        raise ValueError
    def test_skipped(self):  # a decorator's is written without a name by 3.12.1
        self.skipTest("not now")
    @unittest.expectedFailure
    def test_known(self): self.fail()
"""
GOOD, BAD, SKIPPED = parsers.PASSED, parsers.FAILED, parsers.SKIPPED
LOGS = (
    (
        "pytest",
        "tests/a_test.py::test_x[1 - 2] PASSED    [ 50%]\n"
        "PASSED tests/a_test.py::C::test_y\n"
        "FAILED tests/a_test.py::test_z - assert 1 == 2\n"
        "ERROR tests/b_test.py\nSKIPPED [1] tests/a_test.py:3: no\n",
        {
            "tests/a_test.py::test_x[1 - 2]": GOOD,
            "tests/a_test.py::C::test_y": GOOD,
            "tests/a_test.py::test_z": BAD,
            "tests/b_test.py": BAD,
        },
    ),
    (
        "tap",
        "TAP version 13\nok 1 - adds\nnot ok 2 - takes # TODO later\n"
        "not ok 3 - halves\nok 4 # skip no network\n1..4\n",
        {"1 adds": GOOD, "2 takes": SKIPPED, "3 halves": BAD, "4": SKIPPED},
    ),
    (
        "unity",
        "tests/a.c:12:adds:PASS\ntests/a.c:20:takes:FAIL: Expected 1 Was 2\n"
        "tests/a.c:30:later:IGNORE\n3 Tests 1 Failures 1 Ignored\n",
        {"adds": GOOD, "takes": BAD, "later": SKIPPED},
    ),
    (
        "ruby",  # minitest
        "Run options: -v --seed 1\n\nsums#test_0001_adds up = 0.00 s = .\n"
        "SumsTest#test_bad = 0.01 s = F\nSumsTest#test_error = 1.00 s = E\n"
        "SumsTest#test_later = 0.00 s = S\n\n  1) Failure:\nSumsTest#test_bad [a:4]:\n"
        "Expected: 1\n  Actual: 2\n\n4 runs, 2 assertions, 1 failures\n",
        {
            "sums#test_0001_adds up": GOOD,
            "SumsTest#test_bad": BAD,
            "SumsTest#test_error": BAD,
            "SumsTest#test_later": SKIPPED,
        },
    ),
    (
        "testdox",
        "PHPUnit 9.6.7 by Sebastian Bergmann and contributors.\n\n"
        "Sums (A\\B\\Sums)\n ✔ Good\n ✘ Bad\n   │\n   │ Failed asserting that 2 is 1.\n"
        "   │\n\n ↩ Later\n ∅ Incomplete\n ☢ Risky\n ✔ Row with data set #0\n"
        ' ✘ Row with data set "two"\n   │\n\nplain\n ✔ Good [1.25 ms]\n\n'
        "Time: 00:00.015, Memory: 6.00 MB\n\nERRORS!\nTests: 8, Assertions: 4.\n",
        {
            "Sums (A\\B\\Sums): Good": GOOD,
            "Sums (A\\B\\Sums): Bad": BAD,
            "Sums (A\\B\\Sums): Later": SKIPPED,
            "Sums (A\\B\\Sums): Incomplete": SKIPPED,
            "Sums (A\\B\\Sums): Risky": BAD,
            "Sums (A\\B\\Sums): Row with data set #0": GOOD,
            'Sums (A\\B\\Sums): Row with data set "two"': BAD,
            "plain: Good": GOOD,
        },
    ),
    (
        "go",
        "=== RUN   TestA\n--- PASS: TestA (0.00s)\n    --- FAIL: TestA/b (0.01s)\n"
        "--- SKIP: TestC (0.00s)\n",
        {"TestA": GOOD, "TestA/b": BAD, "TestC": SKIPPED},
    ),
    (
        "cargo",
        "running 3 tests\ntest a::b ... ok\ntest c - should panic ... FAILED\n"
        "test d ... ignored\n",
        {"a::b": GOOD, "c": BAD, "d": SKIPPED},
    ),
)


def run(*command, folder=None):
    environ = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


class ParsersTest(parameterized.TestCase):
    @parameterized.named_parameters((log[0], *log) for log in LOGS)
    def test_written_logs(self, parser, log, outcomes):
        self.assertEqual(parsers.PARSERS[parser](log), outcomes)
        self.assertEqual(parsers.detect(log), parser)

    def test_a_test_fails_if_one_of_its_runs_does(self):
        for log in ("not ok 1 x\nok 1 x\n", "ok 1 x\nnot ok 1 x\n"):
            self.assertEqual(parsers.parse_tap(log), {"1 x": BAD})

    def test_test_unit(self):
        log = (
            "Loaded suite a\nStarted\nSumsTest: \n  test: with a name:\t\t.: (0.0002)\n"
            "  test_bad:\t\t\tF\n=====\nFailure: test_bad(SumsTest)\n<1> expected but\n"
            "<2>\n=====\n: (0.012588)\n  test_error:\t\tE\n  test_later:\t\tO\n"
            "SumsTest::InnerTest: \n  test_bad:\t\t.: (0.0001)\n\n6 tests, 4\n"
        )
        outcomes = {
            "SumsTest#test: with a name": GOOD,
            "SumsTest#test_bad": BAD,
            "SumsTest#test_error": BAD,
            "SumsTest#test_later": SKIPPED,
            "SumsTest::InnerTest#test_bad": GOOD,
        }
        self.assertEqual(parsers.parse_ruby(log), outcomes)

    def test_unittest_as_it_writes(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "suite.py").write_text(SUITE)
            log = run(sys.executable, "-m", "unittest", "-v", "suite", folder=folder)
        names = ("good", "bad", "error", "skipped", "known")
        outcomes = (GOOD, BAD, BAD, SKIPPED, GOOD)
        self.assertEqual(
            parsers.parse_unittest(log),
            {f"suite.OfTest.test_{k}": v for k, v in zip(names, outcomes, strict=True)},
        )
        self.assertEqual(parsers.detect(log), "unittest")

    @unittest.skipIf(not shutil.which("node"), "needs nodejs")
    def test_node_as_it_writes(self):
        program = (
            "const t = require('node:test'), a = require('assert');\n"
            "t.describe('sums', () => { t.it('adds', () => a.equal(1, 1));\n"
            "t.it('takes', () => a.equal(1, 2)); });\nt.test('top', () => {});\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "a.test.js").write_text(program)
            command = ("node", "--test", "--test-reporter=tap", "a.test.js")
            outcomes = parsers.parse_tap(run(*command, folder=folder))
        for name, outcome in (("adds", GOOD), ("takes", BAD), ("", BAD)):
            (found,) = (v for k, v in outcomes.items() if k.endswith(f"sums > {name}"
                        if name else "sums"))  # fmt: skip
            self.assertEqual(found, outcome)

    @unittest.skipIf(not shutil.which("perl"), "needs perl")
    def test_perl_as_it_writes(self):
        program = "use Test::More tests => 2; ok(1, 'adds'); is(1, 2, 'takes')"
        outcomes = parsers.parse_tap(run("perl", "-e", program))
        self.assertEqual(outcomes, {"1 adds": GOOD, "2 takes": BAD})


if __name__ == "__main__":
    environment.main()
