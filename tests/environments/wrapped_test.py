"""A taskset behind another is proven as by itself."""

import asyncio
import dataclasses

from absl.testing import parameterized

from glm5_jax import environments
from glm5_jax.environments import proofs, validate
from tests import environment
from tests.environments import proofs_test

OWN = f"{__name__}:Told"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


class Told(proofs_test.Taskset):
    """Three tasks that tell all that can be asked of them."""

    def size(self, split):
        return 3 if split == "train" else 2

    def environment(self):
        made = super().environment()
        made.is_own = True
        return made

    def source_of(self, task):
        return f"source of {task.id}"

    def scored_by(self, task):
        return f"tests of {task.id}"

    async def leaks(self, environment, task):
        return [f"{task.id}, {environment.is_own}"]


class Tooled(Told):
    """Describes a tool."""

    def task(self, split, seed, index):
        made = super().task(split, seed, index)
        return dataclasses.replace(made, tools=(TOOL,))


class WrappedTest(parameterized.TestCase):
    @parameterized.parameters(
        f"context:5:{OWN}",
        f"python:{OWN}",
        f"untold:{__name__}:Tooled",
        f"{OWN}+gcd",
        f"gcd+context:5:python:{OWN}",
    )
    def test_what_a_taskset_tells_of_its_tasks_comes_through(self, name):
        taskset = environments.make(name)
        task = taskset.task("train", 0, 1 if name.startswith("gcd") else 0)
        proof = asyncio.run(proofs.prove(taskset, task, num_repeats=1))
        self.assertEqual(proof.failures, ("an agent can read one/0, True",))
        self.assertEqual(proof.source, "source of one/0")
        self.assertEqual(proofs.scored_by(taskset, task), "tests of one/0")

    @parameterized.parameters("context:5:gcd", "python:gcd", "reverse+gcd")
    def test_one_that_tells_nothing_is_proven_as_before(self, name):
        taskset = environments.make(name)
        task = taskset.task("train", 0, 0)
        proof = asyncio.run(proofs.prove(taskset, task, num_repeats=1))
        self.assertEqual((proof.failures, proof.source), ((), ""))
        self.assertEqual(proofs.scored_by(taskset, task), "")
        self.assertFalse(hasattr(taskset, "size"))

    def test_each_task_of_a_list_is_proven_once(self):
        settings = validate.Settings(num_tasks=9, num_repeats=1, split=validate.ALL)
        figures = validate.validate(f"context:5:{OWN}", settings, None)
        self.assertEqual(figures["tasks"], 5)


if __name__ == "__main__":
    environment.main()
