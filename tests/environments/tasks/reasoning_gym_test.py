"""The adapter, with a substitute for the library, and with it where installed."""

import dataclasses
import hashlib
import importlib.util
import json
import random
import sys
import types
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import protocol
from tests import environment
from tests.environments import episodes

IS_INSTALLED = importlib.util.find_spec("reasoning_gym") is not None


class Dataset:
    """Sums. As in the library, entry i depends on seed + i, and scores are partial."""

    def __init__(self, seed, size):
        self._seed, self._size = seed, size

    def __getitem__(self, i):
        if not 0 <= i < self._size:
            raise IndexError(i)
        rng = random.Random(self._seed + i)
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return {"question": f"{a} + {b} =", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        if answer == "crash":
            raise KeyError(answer)
        if answer == "half":
            return 0.5
        return 1.0 if answer == entry["answer"] else 0.01


def create_dataset(name, seed, size):
    if name != "sums":
        raise ValueError(f"Dataset {name!r} not registered")
    return Dataset(seed, size)


class AdapterTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        library = types.ModuleType("reasoning_gym")
        library.create_dataset = create_dataset
        self.enter_context(mock.patch.dict(sys.modules, reasoning_gym=library))

    def test_partial_credit_is_no_reward(self):
        taskset = environments.make("reasoning_gym:sums")
        task = taskset.task("train", 0, 0)
        (right,) = episodes.play(taskset, task, f" {task.answer['answer']}\n")
        parts = {"correct": 1.0, "score": 1.0}
        self.assertEqual(right.reward, protocol.Reward(1.0, parts))
        self.assertEqual((right.terminated, right.truncated), (True, False))
        (wrong,) = episodes.play(taskset, task, "1000")
        self.assertEqual(wrong.reward.total, 0.0)
        self.assertEqual(wrong.reward.parts["score"], 0.01)
        (silent,) = episodes.play(taskset, task, {"role": "assistant", "content": None})
        self.assertEqual(silent.reward.total, 0.0)

    def test_splits_and_places(self):
        taskset = environments.make("reasoning_gym:sums")
        asked = {
            split: [
                taskset.task(split, seed, i).messages
                for seed in (0, 1)
                for i in range(200)
            ]
            for split in ("train", "held_out")
        }
        questions = {k: {m[0]["content"] for m in v} for k, v in asked.items()}
        self.assertEmpty(questions["train"] & questions["held_out"])
        self.assertGreater(len(questions["train"]), 300)  # seeds do not overlap
        again = environments.make("reasoning_gym:sums").task("train", 1, 199)
        self.assertEqual(again.messages, asked["train"][-1])

    def test_demonstration(self):
        taskset = environments.make("reasoning_gym:sums")
        task = taskset.task("train", 0, 0)
        answer = taskset.demonstration(task)[-1]["content"]
        self.assertEqual(answer, task.answer["answer"])
        for other in (None, "half"):  # no answer, and one of which the scorer doubts
            entry = {**task.answer, "answer": other}
            unknown = dataclasses.replace(task, answer=entry)
            self.assertIsNone(taskset.demonstration(unknown))

    def test_no_task_ever_changes(self):
        """Also behind the last entry of a dataset, where it begins anew."""
        taskset = environments.make("reasoning_gym:sums")
        places = [
            (split, seed, index)
            for split in ("train", "held_out")
            for seed in (0, 7)
            for index in (0, 1, 2, 2147483, 2147484)
        ]
        text = json.dumps([taskset.task(*place).messages for place in places])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.assertEqual(digest, "0d4907d6f2b13439")

    def test_a_scorer_that_falls_over(self):
        taskset = environments.make("reasoning_gym:sums")
        with self.assertRaises(protocol.RewardError):
            episodes.play(taskset, taskset.task("train", 0, 0), "crash")

    def test_an_unknown_dataset(self):
        with self.assertRaisesRegex(config.InputError, "'products'.*not registered"):
            environments.make("reasoning_gym:products")

    def test_a_bad_split(self):
        with self.assertRaisesRegex(config.InputError, "split must be one of"):
            environments.make("reasoning_gym:sums").task("test", 0, 0)

    def test_without_the_extra(self):
        message = r"glm5_jax\[reasoning_gym\]"
        with (
            mock.patch.dict(sys.modules, reasoning_gym=None),
            self.assertRaisesRegex(config.InputError, message),
        ):
            environments.make("reasoning_gym:sums")


@unittest.skipUnless(IS_INSTALLED, "the extra reasoning_gym is not installed")
class LibraryTest(parameterized.TestCase):
    @parameterized.parameters("chain_sum", "spell_backward", "gsm_symbolic")
    def test_demonstrations_earn_one_and_a_guess_nothing(self, name):
        taskset = environments.make(f"reasoning_gym:{name}")
        for i in range(5):
            task = taskset.task("held_out", 0, i)
            turns = episodes.demonstrated(taskset, task)
            (result,) = episodes.play(taskset, task, *turns)
            self.assertEqual(result.reward.total, 1.0)
            (result,) = episodes.play(taskset, task, "-123456")
            self.assertEqual(result.reward.total, 0.0)


if __name__ == "__main__":
    environment.main()
