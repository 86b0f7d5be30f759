"""Answers that are expressions: math-verify decides, in bounded time."""

import asyncio
import importlib.util
import json
import time
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import proofs
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


class WithoutTest(parameterized.TestCase):
    def test_the_extra_is_named(self):
        with (
            mock.patch.object(importlib.util, "find_spec", return_value=None),
            self.assertRaisesRegex(config.InputError, r"glm5_jax\[math_verify\]"),
        ):
            symbolic.Pool()


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

    def test_splits_share_no_question(self):
        taskset = environments.make("algebra:roots")
        train, held_out = (
            {taskset.task(split, 0, i).problem for i in range(60)}
            for split in ("train", "held_out")
        )
        self.assertEmpty(train & held_out)
        self.assertGreater(len(train), 30)

    def test_a_file_of_ones_own(self):
        rows = [{"problem": f"{i} x + x", "answer": f"{i + 1}x"} for i in range(2, 30)]
        path = self.create_tempfile(content="\n".join(map(json.dumps, rows)))
        taskset = environments.make(f"math:{path.full_path}")
        task = taskset.task("train", 0, 0)
        (number,) = (row for row in rows if task.problem == row["problem"])
        (result,) = episodes.play(taskset, task, rf"\boxed{{{number['answer']}}}")
        self.assertEqual(result.reward.total, 1.0)
        asked = {
            taskset.task(split, 0, i).problem for split in ("train", "held_out")
            for i in range(28)
        }  # fmt: skip
        self.assertEqual(asked, {row["problem"] for row in rows})

    def test_what_is_wrong_is_said(self):
        path = self.create_tempfile(content='{"problem": "2x"}')
        with self.assertRaisesRegex(config.InputError, ":1 is no problem"):
            environments.make(f"math:{path.full_path}")
        with self.assertRaisesRegex(config.InputError, "not readable"):
            environments.make("math:nowhere.jsonl")
        with self.assertRaisesRegex(config.InputError, "no kind 'vim'"):
            algebra.Algebra("algebra:vim")


if __name__ == "__main__":
    environment.main()
