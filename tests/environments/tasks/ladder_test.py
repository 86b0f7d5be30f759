"""Every taskset: names, splits, demonstrations that earn 1, wrong answers."""

import contextlib
import io
import math
import pathlib
import re

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import protocol
from glm5_jax.environments.tasks import ladder, problems
from tests import environment
from tests.environments import episodes

EACH = tuple((name, name) for name in problems.names())


def reward_of(name, said, index=0):
    """Returns the reward of an answer to a task, and the task."""
    taskset = environments.make(name)
    task = taskset.task("train", 0, index)
    (result,) = episodes.play(taskset, task, said)
    assert (result.terminated, result.truncated, result.messages) == (True, False, ())
    return result.reward.total


def score_countdown(said):
    return ladder.same_countdown("(1+8)*9", said)


class TasksetTest(parameterized.TestCase):
    @parameterized.named_parameters(*EACH)
    def test_demonstrations_earn_one(self, name):
        taskset = environments.make(name)
        for i in range(50):
            task = taskset.task("held_out", 1, i)
            results = episodes.play(
                taskset, task, *episodes.demonstrated(taskset, task)
            )
            self.assertEqual(results[-1].reward, protocol.Reward(1.0, {"correct": 1.0}))
            self.assertTrue(results[-1].terminated)
            self.assertEqual({r.reward for r in results[:-1]} - {None}, set())

    @parameterized.named_parameters(*EACH)
    def test_the_answer_to_another_task_earns_nothing(self, name):
        taskset = environments.make(name)
        num_right = 0
        for i in range(50):
            other = taskset.task("train", 1, i + 1)
            said = taskset.demonstration(other)[-1]["content"]
            task = taskset.task("train", 1, i)
            (result,) = episodes.play(taskset, task, said)
            num_right += result.reward.parts["correct"]
        self.assertLessEqual(num_right, 5)  # small answers meet by chance

    @parameterized.named_parameters(*EACH)
    def test_texts_that_are_no_answer(self, name):
        taskset = environments.make(name)
        task = taskset.task("train", 0, 0)
        for message in (
            {"role": "assistant"},
            {"role": "assistant", "content": None},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": "", "reasoning_content": task.answer},
            {"role": "assistant", "content": "x" * 1_000_000},
            {"role": "assistant", "content": ["12"]},
        ):
            (result,) = episodes.play(taskset, task, message)
            self.assertEqual(result.reward.total, 0)
            self.assertIsInstance(result.reward.total, float)

    @parameterized.named_parameters(*EACH)
    def test_a_task_is_a_function_of_its_place(self, name):
        first, second = environments.make(name), environments.make(name)
        self.assertEqual(first.task("train", 2, 7), second.task("train", 2, 7))
        self.assertIsInstance(first, protocol.Taskset)
        self.assertIsInstance(first.environment(), protocol.Environment)
        ids = {
            first.task(split, seed, i).id
            for split in problems.SPLITS
            for seed in range(3)
            for i in range(10)
        }
        self.assertLen(ids, 60)

    @parameterized.named_parameters(*EACH)
    def test_programs_print_the_answer(self, name):
        taskset = environments.make(name)
        for i in range(20):
            task, said = taskset.task("held_out", 3, i), io.StringIO()
            program = taskset.program(task)
            if name in ("countdown", "calculator", "calculator_untold"):
                self.assertIsNone(program)
                continue
            with contextlib.redirect_stdout(said):
                exec(program, {})
            (result,) = episodes.play(taskset, task, said.getvalue())
            self.assertEqual(result.reward.total, 1.0)

    def test_attempts_are_wrong_by_one_where_the_answer_is_a_number(self):
        for name, more in (("gcd", 1), ("arithmetic", 1), ("sort", 0)):
            taskset = environments.make(name)
            task = taskset.task("train", 0, 0)
            attempts = taskset.attempts(task)
            self.assertEqual(
                [turn["content"] for turn in attempts.right], [task.answer]
            )
            wrong = [turn["content"] for (turn,) in attempts.wrong]
            numbers = [str(int(task.answer) + 1)] if more else []
            self.assertEqual(wrong, ["\n", "?", *numbers])

    def test_environments_do_not_share_anything(self):
        taskset = environments.make("reverse")
        self.assertIsNot(taskset.environment(), taskset.environment())

    @parameterized.parameters(
        ("revers", "Did you mean 'reverse'"),
        ("calculator_without", "Did you mean 'calculator_without_tool'"),
        ("knitting", "Choose one of reverse, reverse_dense"),
        ("reverse:0", "within 1-256"),
        ("reverse_dense:0", "within 1-256"),
        ("calculator_untold:1", "within 2-9"),
    )
    def test_bad_names(self, name, message):
        with self.assertRaisesRegex(config.InputError, message):
            environments.make(name)

    def test_sizes(self):
        for name in ("reverse:9", "reverse_dense:9"):
            task = environments.make(name).task("train", 0, 0)
            self.assertLen(task.answer, 9)


class ScoreTest(parameterized.TestCase):
    def test_exact(self):
        self.assertEqual(reward_of("reverse", "yplhvk"), 1)  # reverse kvhlpy
        self.assertEqual(reward_of("reverse", " yplhvk\n"), 1)
        for said in ("yplhv", "yplhvkk", "kvhlpy", "Yplhvk", "yplhvk yplhvk"):
            self.assertEqual(reward_of("reverse", said), 0)

    def test_by_position(self):
        self.assertEqual(reward_of("reverse_dense", "yplhvk"), 1)
        self.assertEqual(reward_of("reverse_dense", "yplxxx"), 0.5)
        self.assertEqual(reward_of("reverse_dense", "ypl"), 0.5)
        self.assertEqual(reward_of("reverse_dense", "yplhvk" * 2), 0.5)
        self.assertEqual(reward_of("reverse_dense", ""), 0)
        # Saying everything does not pay.
        self.assertLess(reward_of("reverse_dense", "y" * 1000), 0.01)

    def test_numbers(self):
        for said in ("34", "34.", "9+25=34", "the answer is 34"):  # 9+25
            self.assertEqual(reward_of("arithmetic", said), 1)
        for said in ("35", "3 4", "34 or 35", "9+25"):
            self.assertEqual(reward_of("arithmetic", said), 0)

    def test_countdown(self):
        for said in ("(1+8)*9", "9*(8+1)", " 9 * (1 + 8) ", "9*8+9*1-0*0"):
            expected = float(said != "9*8+9*1-0*0")  # uses 9 twice, and zeros
            self.assertEqual(score_countdown(said), expected)
        for said in ("81", "9*9", "(1+8)*9+0", "1*8*9", "(1+8)*9=81", "make", ""):
            self.assertEqual(score_countdown(said), 0)

    def test_rewards_are_finite_floats(self):
        for name in problems.names():
            for said in ("1", "nan", "inf", "-inf", "1/0", "\\boxed{nan}"):
                total = reward_of(name, said)
                self.assertTrue(isinstance(total, float) and math.isfinite(total))


class DocsTest(parameterized.TestCase):
    def test_the_environment_of_docs_rl_runs(self):
        docs = pathlib.Path(__file__).parents[3] / "docs" / "rl.md"
        (code,) = re.findall(r"```python\n(.*?)```", docs.read_text(), re.DOTALL)
        scope = {}
        exec(code, scope)  # our own page
        taskset = scope["Bits"]()
        self.assertIsInstance(taskset, protocol.Taskset)
        splits = [
            {taskset.task(split, 0, i).messages[0]["content"] for i in range(100)}
            for split in problems.SPLITS
        ]
        self.assertEmpty(splits[0] & splits[1])
        task = taskset.task("train", 1, 2)
        turns = episodes.demonstrated(taskset, task)
        self.assertEqual(episodes.play(taskset, task, *turns)[0].reward.total, 1.0)


if __name__ == "__main__":
    environment.main()
