"""Statements show what fails, and name neither the solution's lines nor tests."""

from unittest import mock

from absl.testing import absltest

from glm5_jax.environments.worlds.swe import records, statements

LOG = """not ok 8 - a list
#   Failed test 'a list'
#   at t/10_Aligner.t line 20.
#          got: '3'
# seen in t/10_Aligner.t: return 3 + one
"""


class StatementsTest(absltest.TestCase):
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

    def test_its_own_sentences_are_no_statement_of_code(self):
        """A solution that adds `continue` is told of by nothing in each statement."""
        patch = "--- a/x\n+++ b/x\n+    continue\n+    breakpoint()\n"
        record = mock.Mock(spec=records.Record, patch=patch, FAIL_TO_PASS=())
        for log in (LOG, ""):
            written = statements.write("x", "python", log, "", patch, ())
            self.assertEmpty(statements.leaks(written, record))


if __name__ == "__main__":
    absltest.main()
