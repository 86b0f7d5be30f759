"""A Python tool for any taskset: programs run in the sandbox, answers are scored."""

import asyncio
import unittest

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, python_tool, tool_calls
from glm5_jax.environments.sandbox import bubblewrap
from tests import environment
from tests.environments import episodes

MISSING = bubblewrap.missing()
KINDS = ("reverse", "sort", "arithmetic", "chain_sum", "gcd", "calculator_without_tool")


def python(code):
    return tool_calls.turn("python", code=code)


class PythonToolTest(parameterized.TestCase):
    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    @parameterized.parameters(*KINDS)
    def test_demonstrated_programs_print_the_answer(self, kind):
        taskset = environments.make(f"python:{kind}")
        task = taskset.task("held_out", 0, 0)
        turns = taskset.demonstration(task)
        call, said, answer = turns[-3:]
        printed, last = episodes.play(taskset, task, call, answer)
        self.assertEqual(printed.messages[0]["content"], said["content"])
        self.assertEqual(last.reward.total, 1.0)

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_tasks_are_proven(self):
        taskset = environments.make("python:gcd:3")
        task = taskset.task("train", 0, 0)
        self.assertEqual(task.tools, python_tool.TOOLS)
        proof = asyncio.run(proofs.prove(taskset, task, 1))
        self.assertEmpty(proof.failures)

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_files_stay_and_programs_do_not(self):
        taskset = environments.make("python:gcd")
        first, second, third = episodes.play(
            taskset,
            taskset.task("train", 0, 0),
            python("x = 1; open('kept', 'w').write('here')"),
            python("print(open('kept').read()); print(x)"),
            tool_calls.turn("calc", expression="1"),
        )
        self.assertEqual(first.messages[0]["content"], "(no output)")
        self.assertIn("here", second.messages[0]["content"])
        self.assertIn("NameError", second.messages[0]["content"])
        self.assertIn("no tool 'calc'; use python", third.messages[0]["content"])

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_a_program_that_hinders_the_next_one_is_told(self):
        taskset = environments.make("python:gcd")
        task = taskset.task("train", 0, 0)
        hinder = "import os; os.remove('program.py'); os.mkdir('program.py')"
        answer = taskset.demonstration(task)[-1]
        _, said, last = episodes.play(
            taskset, task, python(hinder), python("print(1)"), answer
        )
        self.assertIn("program.py could not be written", said.messages[0]["content"])
        self.assertEqual(last.reward.total, 1.0)

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_episodes_are_cut_off(self):
        taskset = environments.make("python:gcd")
        turns = [python("print(1)")] * python_tool.MAX_TURNS
        *_, last = episodes.play(taskset, taskset.task("train", 0, 0), *turns)
        self.assertTrue(last.truncated)
        self.assertEqual(last.reward.total, 0.0)

    def test_tasks_with_tools_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "has tools of its own"):
            environments.make("python:calculator")

    def test_kinds_without_a_program_have_no_demonstration(self):
        taskset = environments.make("python:countdown")
        self.assertIsNone(taskset.demonstration(taskset.task("train", 0, 0)))


if __name__ == "__main__":
    environment.main()
