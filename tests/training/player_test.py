"""Held-out tasks of which no two are alike, and the interval over them."""

from absl.testing import parameterized

from glm5_jax import environments
from glm5_jax.training.feeds import player
from tests import environment


class HeldOutTest(parameterized.TestCase):
    @parameterized.parameters("gcd", "arithmetic:1-2", "reverse:3-6", "countdown")
    def test_no_task_is_asked_twice(self, name):
        taskset = environments.make(name)
        tasks = player.held_out_tasks(taskset, 128)
        self.assertLen(tasks, 128)
        self.assertLen({task.messages[0]["content"] for task in tasks}, 128)
        first = [taskset.task("held_out", 0, i) for i in range(200)]
        ids = [task.id for task in first]
        places = [ids.index(task.id) for task in tasks[:32]]
        self.assertEqual(places, sorted(places))

    def test_where_there_are_fewer_it_says_so(self):
        with self.assertLogs(level="WARNING") as logs:
            tasks = player.held_out_tasks(environments.make("reverse:1"), 64)
        self.assertBetween(len(tasks), 1, 12)  # a fifth of 26 letters
        self.assertIn("fewer than rl.num_eval_tasks=64", logs.output[0])


if __name__ == "__main__":
    environment.main()
