"""Answers that are expressions: math-verify decides, in bounded time."""

import asyncio
import fractions
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import unittest
from concurrent import futures
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs, protocol
from glm5_jax.environments.tasks import algebra, symbolic
from tests import environment
from tests.environments import episodes

IS_INSTALLED = importlib.util.find_spec("math_verify") is not None
EQUAL = (
    ("x^2+2x", r"so it is \boxed{2x + x^2}."),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
    (r"\{1, 2\}", r"\boxed{\{2, 1\}}"),
    (r"\int_0^1 x dx", r"\boxed{\int_0^1 x dx}"),
)
UNEQUAL = (
    ("x^2+2x", r"\boxed{x^2-2x}"),
    ("2x", r"\boxed{\frac{d}{dx}(x^2)}"),
    (r"\frac{x^2}{2}", r"\boxed{\int x dx}"),
    (r"\{1, 2\}", r"\boxed{\{1\}}"),
    ("x", ""),
    ("x", None),
    ("x", "\ud800 \\boxed{"),
)

# Stands for math-verify where it is not installed: texts are equal that have the same
# characters, in any order. Words in an answer make it behave as sympy may.
SUBSTITUTE = r"""
import mmap, os, re, time

def parse(text, parsing_timeout):
    found = re.fullmatch(r"\\boxed\{(.*)\} *|\$(.*)\$", text)
    said = (found[1] or found[2]) if found else text
    is_late = parsing_timeout and "slow" in said
    return [] if "?" in said or is_late else [said]

def verify(right, said, timeout_seconds):
    (word,) = said[0].split()[-1:]
    if word in ("sleep", "hang"):
        time.sleep(4 if word == "sleep" else 30)  # less than the usual limit, more
    elif word == "exit":
        os._exit(1)
    elif word == "noise":
        print(word)
    elif word == "memory":
        mmap.mmap(-1, 3 * 2**30)
    elif word == "meet":
        folder = os.environ["MEETING"]
        open(os.path.join(folder, str(os.getpid())), "w").close()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
    return all(sorted(one) in map(sorted, said) for one in right)
"""
DIGESTS = {
    "algebra:antiderivative": "d7db8016000ce4f0",
    "algebra:crossing": "f670c90e6f5bbb8e",
    "algebra:derivative": "1949ad4104c5b640",
    "algebra:roots": "723f43f8475b2670",
}


class WithoutTest(parameterized.TestCase):
    def test_the_extra_is_named(self):
        with (
            mock.patch.object(importlib.util, "find_spec", return_value=None),
            self.assertRaisesRegex(config.InputError, r"glm5_jax\[math_verify\]"),
        ):
            symbolic.Pool()


class SubstituteTest(parameterized.TestCase):
    """Has a substitute for the library, and a list of the processes that started."""

    def setUp(self):
        super().setUp()
        self.use(SUBSTITUTE)
        self.started, start = [], subprocess.Popen

        def started(*args, **options):
            self.started.append(start(*args, **options))
            return self.started[-1]

        self.enter_context(mock.patch.object(subprocess, "Popen", started))

    def use(self, text):
        """Takes another text as the library."""
        folder = self.create_tempdir()
        folder.create_file("math_verify.py", content=text)
        self.enter_context(
            mock.patch.object(sys, "path", [folder.full_path, *sys.path])
        )
        environ = {"PYTHONPATH": folder.full_path}
        self.enter_context(mock.patch.dict(os.environ, environ))

    def make_pool(self, *args, **options):
        pool = symbolic.Pool(*args, **options)
        self.addCleanup(pool.close)
        return pool

    def assert_ended(self, process):
        """Checks that a process was waited for, and its pipes are closed."""
        self.assertIsNotNone(process.returncode)
        self.assertTrue(process.stdin.closed and process.stdout.closed)


class PoolTest(SubstituteTest):
    @parameterized.parameters(
        ("1+x", "x+1", True),
        ("1+x", r"so it is \boxed{x+1}, not x", True),
        ("1+x", "x+2", False),
        ("1/2", "0.5?", True),  # a number: the library reads no question mark
        (r"\int x dx", r"\boxed{dx \int x}", True),
        ("x int", r"\boxed{\int x}", False),  # work left to do
        ("slow", "wols", True),  # no limit but the pool's
        ("wols", "slow", True),
        ("1+x", "?", False),
        ("?", "1+x", False),
        ("1+x", "  ", False),
        ("1+x", "", False),
        ("1+x", None, False),
        ("1+x", 1, False),
        # 4000 characters are read, from the end.
        ("1+x", r"\boxed{x+1}" + " " * (4000 - len(r"\boxed{x+1}")), True),
        ("1+x", r"\boxed{x+1}" + " " * (4001 - len(r"\boxed{x+1}")), False),
        ("1+x", "x" + "+1".rjust(3999), False),
    )
    def test_equality(self, reference, given, is_equal):
        self.assertIs(self.make_pool(1).is_equal(reference, given), is_equal)

    def test_a_process_is_used_again_until_the_pool_closes(self):
        pool = self.make_pool(2)
        for given in ("x+1", "x+2", "x+1"):
            self.assertEqual(pool.is_equal("1+x", given), given == "x+1")
        (process,) = self.started
        self.assertIsNone(process.poll())
        pool.close()
        self.assert_ended(process)

    @parameterized.parameters("exit", "memory")
    def test_a_process_that_ends_is_replaced(self, word):
        pool = self.make_pool(1)
        self.assertFalse(pool.is_equal(word[::-1], word))
        self.assert_ended(self.started[0])
        self.assertTrue(pool.is_equal("1+x", "x+1"))
        self.started[1].kill()
        self.started[1].wait()
        self.assertFalse(pool.is_equal("1+x", "x+1"))
        self.assertTrue(pool.is_equal("1+x", "x+1"))
        self.assertLen(self.started, 3)

    def test_a_comparison_ends_in_time(self):
        pool = self.make_pool(1, seconds=0.1)
        self.assertFalse(pool.is_equal("peels", "sleep"))
        began = time.monotonic()
        self.assertFalse(pool.is_equal("gnah", "hang"))
        self.assertLess(time.monotonic() - began, 25.0)
        for process in self.started:
            self.assert_ended(process)
        self.assertLen(self.started, 2)

    def test_what_is_no_verdict_raises_and_ends_the_process(self):
        pool = self.make_pool(1)
        with self.assertRaises(ValueError):
            pool.is_equal("esion", "noise")
        self.assert_ended(self.started[0])
        self.assertTrue(pool.is_equal("1+x", "x+1"))

    def test_a_process_that_does_not_start(self):
        pool = self.make_pool(1)
        self.use("raise SystemExit")
        with self.assertRaisesRegex(RuntimeError, "did not start"):
            pool.is_equal("1+x", "x+1")
        self.assert_ended(self.started[0])
        self.use(SUBSTITUTE)
        self.assertTrue(pool.is_equal("1+x", "x+1"))

    def test_several_compare_at_once(self):
        pool, meeting = self.make_pool(2, seconds=20.0), self.create_tempdir()
        environ = {"MEETING": meeting.full_path}
        with (
            mock.patch.dict(os.environ, environ),
            futures.ThreadPoolExecutor(2) as threads,
        ):
            found = threads.map(pool.is_equal, ["teem"] * 2, ["meet"] * 2)
            self.assertEqual([*found], [True, True])


def value(text, x):
    """Returns the value of a polynomial in LaTeX."""
    text = re.sub(r"(?<=\d)x", "*x", text).replace("^{", "**(").replace("}", ")")
    return eval(text, {"x": x})


def slope(text, x):
    """Returns the derivative by a complex step, exact to rounding."""
    return value(text, x + 1e-20j).imag / 1e-20


class KindsTest(SubstituteTest):
    def setUp(self):
        super().setUp()
        algebra._pool.cache_clear()
        self.addCleanup(algebra._pool.cache_clear)
        self.addCleanup(lambda: algebra._pool().close())

    def tasks(self, kind):
        taskset = environments.make(f"algebra:{kind}")
        tasks = [taskset.task("train", 0, i) for i in range(50)]
        self.assertEqual({task.tag for task in tasks}, {kind})
        return tasks

    def test_derivatives(self):
        for task in self.tasks("derivative"):
            asked = re.fullmatch(r"Differentiate \$(.*)\$ with .*", task.problem)[1]
            right, near, _ = task.answer
            for x in (-2, 1, 3):
                self.assertAlmostEqual(slope(asked, x), value(right, x))
            self.assertNotEqual(value(near, 1), value(right, 1))

    def test_antiderivatives(self):
        for task in self.tasks("antiderivative"):
            asked, start = re.findall(r"=([^$]*)\$", task.problem)
            right, near, _ = task.answer
            for x in (-2, 1, 3):
                self.assertAlmostEqual(slope(right, x), value(asked, x))
            self.assertEqual(value(right, 0), int(start))
            self.assertEqual(value(near, 0), 0)

    def test_roots(self):
        for task in self.tasks("roots"):
            asked = re.search(r"\$(.*)=0\$", task.problem)[1]
            for answer, count in zip(task.answer[:2], (2, 1), strict=True):
                roots = {*map(int, re.findall(r"-?\d+", answer))}
                self.assertLen(roots, 2)
                self.assertEqual(sum(value(asked, x) == 0 for x in roots), count)

    def test_crossings(self):
        for task in self.tasks("crossing"):
            lines = re.findall(r"y=([^$]*)\$", task.problem)
            for answer, is_right in zip(task.answer[:2], (True, False), strict=True):
                x = fractions.Fraction(*map(int, re.findall(r"-?\d+", answer)))
                left, right = (value(line, x) for line in lines)
                self.assertEqual(left == right, is_right)

    @parameterized.parameters(*DIGESTS.items())
    def test_no_task_ever_changes(self, name, digest):
        taskset = environments.make(name)
        tasks = [
            taskset.task(split, 7, i)
            for split in ("train", "held_out")
            for i in range(100)
        ]
        text = json.dumps([[t.id, t.messages, t.answer, t.tag] for t in tasks])
        self.assertEqual(hashlib.sha256(text.encode()).hexdigest()[:16], digest)

    def test_all_kinds_come_in_turn(self):
        taskset = environments.make("algebra")
        kinds = [taskset.task("held_out", 1, i).tag for i in range(8)]
        self.assertEqual(kinds, [name.partition(":")[2] for name in DIGESTS] * 2)

    def test_splits_share_no_question(self):
        taskset = environments.make("algebra:roots")
        train, held_out = (
            {taskset.task(split, 0, i).problem for i in range(60)}
            for split in ("train", "held_out")
        )
        self.assertEmpty(train & held_out)
        self.assertGreater(len(train), 30)

    def test_an_episode(self):
        taskset = environments.make("algebra")
        task = taskset.task("train", 0, 0)
        turns = episodes.demonstrated(taskset, task)
        (right,) = episodes.play(taskset, task, *turns)
        self.assertEqual(
            right,
            protocol.StepResult(
                (), protocol.Reward(1.0, {"correct": 1.0}), True, False
            ),
        )
        (wrong,) = episodes.play(taskset, task, "x")
        self.assertEqual(wrong.reward, protocol.Reward(0.0, {"correct": 0.0}))
        attempts = taskset.attempts(task)
        self.assertEqual(list(attempts.right), turns)
        said = [turn["content"] for (turn,) in attempts.wrong]
        wanted = [f"\\boxed{{{text}}}" for text in (*task.answer[1:], "?")]
        self.assertEqual(said, wanted)

    def test_a_file_of_ones_own(self):
        rows = [{"problem": f"{i} x + x", "answer": f"{i + 1}x"} for i in range(2, 30)]
        path = self.create_tempfile(content="\n\n".join(map(json.dumps, rows)))
        taskset = environments.make(f"math:{path.full_path}")
        answers = {row["problem"]: row["answer"] for row in rows}
        orders = []
        for split in ("train", "held_out"):
            tasks = [taskset.task(split, 0, i) for i in range(60)]
            for task in tasks:
                self.assertEqual(task.answer, (answers[task.problem], "", ""))
                self.assertEqual(task.tag, "file")
                self.assertLen(taskset.attempts(task).wrong, 1)
            number = len({task.problem for task in tasks})
            turns = [
                [task.problem for task in tasks[i : i + number]] for i in (0, number)
            ]
            self.assertCountEqual(*turns)
            self.assertLen(turns[0], len({*turns[0]}))
            orders += turns
        self.assertNotEqual(orders[0], orders[1])
        self.assertEqual({*orders[0], *orders[2]}, {*answers})

    def test_a_file_without_problems_of_a_split(self):
        path = self.create_tempfile(content='{"problem": "2", "answer": 2}')
        taskset = environments.make(f"math:{path.full_path}")
        splits = []
        for split in ("train", "held_out"):
            try:
                self.assertEqual(taskset.task(split, 0, 5).answer[0], "2")
                splits.append(split)
            except config.InputError as error:
                self.assertIn(f"no problem in {split}", str(error))
        self.assertLen(splits, 1)

    def test_a_line_of_a_file_ends_at_a_line_feed_alone(self):
        content = '{"problem": "1\u2028+ 1", "answer": "2\x85"}\n'
        path = self.create_tempfile(content=content)
        found = algebra._read(pathlib.Path(path.full_path))
        [draft] = [draft for drafts in found.values() for draft in drafts]
        self.assertEqual(draft.question, "1\u2028+ 1")

    @parameterized.parameters(
        ('\n{"problem": "2x"}', ":2 is no problem"),
        ("2", ":1 is no problem"),
        ("{", ":1 is no problem"),
    )
    def test_wrong_files(self, content, message):
        path = self.create_tempfile(content=content)
        with self.assertRaisesRegex(config.InputError, message):
            environments.make(f"math:{path.full_path}")

    def test_wrong_names(self):
        with self.assertRaisesRegex(config.InputError, "not readable"):
            environments.make("math:nowhere.jsonl")
        with self.assertRaisesRegex(config.InputError, "no kind 'vim'"):
            algebra.Algebra("algebra:vim")


@unittest.skipUnless(IS_INSTALLED, "the extra math_verify is not installed")
class EqualityTest(parameterized.TestCase):
    def test_expressions(self):
        pool = symbolic.Pool(1)
        self.addCleanup(pool.close)
        for reference, given in EQUAL:
            self.assertTrue(pool.is_equal(reference, given), (reference, given))
        for reference, given in UNEQUAL:
            self.assertFalse(pool.is_equal(reference, given), (reference, given))

    def test_a_comparison_that_takes_too_long_ends_and_others_follow(self):
        pool = symbolic.Pool(1, seconds=3.0)
        self.addCleanup(pool.close)
        began = time.monotonic()
        self.assertFalse(pool.is_equal("x", r"\boxed{9^{9^{9^{9}}} x}"))
        self.assertLess(time.monotonic() - began, 30.0)
        self.assertTrue(pool.is_equal("x+1", r"\boxed{1+x}"))


@unittest.skipUnless(IS_INSTALLED, "the extra math_verify is not installed")
class AlgebraTest(parameterized.TestCase):
    def test_a_task_of_each_kind_is_proven(self):
        taskset = environments.make("algebra")
        for i in range(4):
            task = taskset.task("train", 0, i)
            proof = asyncio.run(proofs.prove(taskset, task, 1))
            self.assertEmpty(proof.failures)
            self.assertEqual(proof.num_episodes, 5)  # right, near, asked, "?", nothing


if __name__ == "__main__":
    environment.main()
