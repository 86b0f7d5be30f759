"""Statements show what fails, and name neither the solution's lines nor tests."""

from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax.environments.worlds.swe import records, statements

LOG = """not ok 8 - a list
#   Failed test 'a list'
#   at t/10_Aligner.t line 20.
#          got: '3'
# seen in t/10_Aligner.t: return 3 + one
"""


class StatementsTest(parameterized.TestCase):
    def test_names_of_tests_and_lines_of_the_solution_are_left_out(self):
        tests = ("t/10_Aligner.t", "t/10_Aligner.t::8 a list")
        patch = "--- a/x\n+++ b/x\n-return 3 + one\n+return 2 + one\n"
        written = statements.write("x", "perl", LOG, "", patch, tests)
        self.assertIn("got: '3'", written)
        self.assertNotIn("10_Aligner", written)
        self.assertNotIn("return 3", written)
        other = statements.write("x", "perl", LOG, "", "", tests)
        self.assertIn("seen in (a test): return 3", other)
        known = statements.write("x", "perl", LOG, LOG, patch, tests)
        self.assertIn("without a result", known)

    @parameterized.parameters(
        (
            "t/sums_test.rb",
            "Run options: -v\n\n# Running:\n\nSumsTest#test_bad = 0.01 s = F\n\n"
            "Finished in 0.003s, 9.5 runs/s, 9.1 assertions/s.\n\n  1) Failure:\n"
            "SumsTest#test_bad [t/sums_test.rb:2]:\nExpected: 1\n  Actual: 2\n\n"
            "1 runs, 1 assertions, 1 failures, 0 errors, 0 skips\n",
            ">>> line 2\nExpected: 1\n  Actual: 2",
        ),
        (
            "tests/SumsTest.php",
            "PHPUnit 9.6.7 by Sebastian Bergmann and contributors.\n\nSums (A\\Sums)\n"
            " ✘ Bad\n   │\n   │ Failed asserting that 2 is 1.\n   │\n"
            "   │ /work/repo/src/Sums.php:1\n   │ /work/repo/tests/SumsTest.php:3\n\n"
            "Time: 00:00.015, Memory: 6.00 MB\n\nFAILURES!\nTests: 1, Assertions: 1.\n",
            "Failed asserting that 2 is 1.\n>>> line 3",
        ),
        (
            "test/own/SumsTest.java",
            "\nok - good(own.SumsTest)\n\nnot ok - bad(own.SumsTest)\n"
            "java.lang.AssertionError: expected:<1> but was:<2>\n"
            "\tat org.junit.Assert.fail(Assert.java:89)\n"
            "\tat own.SumsTest.bad(SumsTest.java:1)\n\t... 21 more\n",
            "java.lang.AssertionError: expected:<1> but was:<2>\n>>> line 1",
        ),
        (
            "sums_test.go",
            "=== RUN   TestBad\n    sums_test.go:2: 1 + 1 = 3\n--- FAIL: TestBad (0s)\n"
            "FAIL\nFAIL\town.org/sums\t0.004s\nFAIL\n",
            "1 + 1 = 3",
        ),
    )
    def test_other_runners_show_the_test_line_and_the_values(self, path, log, shown):
        files = {path: b"line 1\nline 2\nline 3\n"}
        written = statements.write("x", "y", log, "", "", (), files)
        told = written.split("```")[1].strip("\n")
        self.assertEqual(told, shown)

    def test_its_own_sentences_are_no_statement_of_code(self):
        """A solution that adds `continue` is told of by nothing in each statement."""
        patch = "--- a/x\n+++ b/x\n+    continue\n+    breakpoint()\n"
        record = mock.Mock(spec=records.Record, patch=patch, FAIL_TO_PASS=())
        for log in (LOG, ""):
            written = statements.write("x", "python", log, "", patch, ())
            self.assertEmpty(statements.leaks(written, record))


if __name__ == "__main__":
    absltest.main()
