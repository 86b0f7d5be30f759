"""Tags whose environments fail are paused, and never all of them."""

from unittest import mock

from absl.testing import absltest

from glm5_jax.rl.actors import failing


class FailingTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.clock = mock.Mock(monotonic=mock.Mock(return_value=1000.0))
        self.enterContext(mock.patch.object(failing, "time", self.clock))
        self.made = failing.Failing()

    def note(self, tag, number, reason=""):
        for _ in range(number):
            self.made.note(tag, reason)

    def test_a_tag_that_fails_is_paused_for_a_while(self):
        self.note("good", 1)
        self.note("bad", 1)
        self.note("bad", 14, "crash")
        self.assertFalse(self.made.is_paused("bad"))
        self.note("bad", 1, "crash")
        self.assertTrue(self.made.is_paused("bad"))
        self.assertFalse(self.made.is_paused("good"))
        self.clock.monotonic.return_value += 599.0
        self.assertTrue(self.made.is_paused("bad"))
        self.clock.monotonic.return_value += 1.0
        self.assertFalse(self.made.is_paused("bad"))
        self.note("bad", 1, "crash")  # still
        self.assertTrue(self.made.is_paused("bad"))

    def test_a_tag_of_which_some_groups_work_is_played(self):
        self.note("good", 1)
        for _ in range(20):
            self.note("bad", 7, "crash")
            self.note("bad", 1)
            self.assertFalse(self.made.is_paused("bad"))

    def test_the_last_tag_is_played_until_the_run_ends(self):
        self.note("a", 16, "crash")
        self.assertFalse(self.made.is_paused("a"))
        self.note("b", 16, "crash")
        self.assertTrue(self.made.is_paused("b"))
        self.note("a", 31, "crash")
        self.assertFalse(self.made.is_paused("a"))
        words = "64 of the last 64 groups failed, .* crash.*'a': 16, 'b': 16.*resumes"
        with self.assertRaisesRegex(failing.FailingError, words):
            self.note("a", 1, "crash")

    def test_few_groups_that_work_are_not_enough(self):
        self.note("", 4)
        self.note("", 59, "crash")
        with self.assertRaisesRegex(failing.FailingError, "60 of the last 64"):
            self.note("", 1, "crash")
        self.made = failing.Failing()
        self.note("", 5)
        self.note("", 59, "crash")


if __name__ == "__main__":
    absltest.main()
