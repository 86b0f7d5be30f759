"""Tools that the prompt does not describe are there all the same."""

from absl.testing import parameterized

from glm5_jax import config, environments
from tests import environment
from tests.environments import episodes


class UntoldTest(parameterized.TestCase):
    def test_a_task_has_no_tools_and_is_otherwise_the_same(self):
        told, untold = map(environments.make, ("calculator:2", "untold:calculator:2"))
        for split in ("train", "held_out"):
            given, task = (one.task(split, 1, 2) for one in (told, untold))
            self.assertEqual(task.tools, ())
            self.assertNotEmpty(given.tools)
            self.assertEqual(
                (task.id, task.messages, task.answer, task.problem, task.tag),
                (given.id, given.messages, given.answer, given.problem, given.tag),
            )
            self.assertEqual(untold.demonstration(task), told.demonstration(given))
            self.assertEqual(untold.attempts(task), told.attempts(given))

    def test_calls_are_answered(self):
        untold = environments.make("untold:calculator:2")
        task = untold.task("train", 0, 0)
        turns = episodes.demonstrated(untold, task)
        called, answered = episodes.play(untold, task, *turns)
        self.assertEqual(called.messages[0]["content"], task.answer)
        self.assertEqual(answered.reward.total, 1.0)

    def test_a_mixture_and_a_shortened_history_may_hold_it(self):
        mixed = environments.make("untold:calculator:2+gcd")
        self.assertEqual([mixed.task("train", 0, i).tools for i in (0, 1)], [(), ()])
        shortened = environments.make("context:5:untold:calculator:2")
        self.assertEqual(shortened.task("train", 0, 0).tools, ())

    @parameterized.parameters(
        ("untold:gcd", "describes no tools"),
        ("untold:tests.environments.mixture_test:Agents", "describe their tools"),
        ("untold:nothing", "no task 'nothing'"),
        ("untold", "no task 'untold'"),
    )
    def test_others_are_refused(self, name, message):
        with self.assertRaisesRegex(config.InputError, message):
            environments.make(name)


if __name__ == "__main__":
    environment.main()
