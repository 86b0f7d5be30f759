"""Several tasksets as one: their shares, their tasks unchanged, and what is refused."""

import asyncio
import collections

from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import context, protocol
from glm5_jax.environments import mixture as mixture_lib
from tests import environment
from tests.environments import episodes
from tests.rl import rollouts_test

NAMES = ("reverse:3-6", "calculator_untold:2", "gcd")
NAME = "3*reverse:3-6+2*calculator_untold:2+gcd"
WEIGHTS = (3, 2, 1)
AGENTS = f"{__name__}:Agents"


def part_of(task):
    return int(task.id.partition("/")[0])


class MixtureTest(parameterized.TestCase):
    def test_every_start_of_the_tasks_has_the_shares(self):
        mixture = environments.make(NAME)
        seen = collections.Counter()
        for index in range(60):
            seen[part_of(mixture.task("train", 0, index))] += 1
            for number, weight in enumerate(WEIGHTS):
                share = weight * (index + 1) / sum(WEIGHTS)
                self.assertLess(abs(seen[number] - share), 1, (index, number))
        self.assertEqual([seen[n] for n in range(3)], [30, 20, 10])

    @parameterized.parameters(
        ((8, 60, 2, 1, 1, 40, 2, 60, 2, 1, 2),),
        ((6, 6, 1, 1, 1, 1, 1, 40, 13),),
        ((2, 1, 1),),
    )
    def test_small_weights_beside_large_ones_have_their_shares(self, weights):
        order, total = mixture_lib._even(weights), sum(weights)
        for place in range(1, total + 1):
            for number, weight in enumerate(weights):
                off = order[:place].count(number) * total - place * weight
                self.assertLess(abs(off), total, (place, number))

    def test_an_order_that_had_the_shares_stays(self):
        """A run that resumes goes on with the same tasks."""
        self.assertEqual(mixture_lib._even(WEIGHTS), [0, 1, 0, 2, 1, 0])
        self.assertEqual(mixture_lib._even((1, 1, 1, 1)), [0, 1, 2, 3])

    def test_the_tasks_are_the_first_ones_of_each_part(self):
        mixture = environments.make(NAME)
        tasks = [mixture.task("held_out", 7, index) for index in range(12)]
        for number, name in enumerate(NAMES):
            part = environments.make(name)
            own = [task for task in tasks if part_of(task) == number]
            self.assertLen(own, 2 * WEIGHTS[number])
            for index, task in enumerate(own):
                wanted = part.task("held_out", 7, index)
                self.assertEqual(task.messages, wanted.messages)
                self.assertEqual(task.tools, wanted.tools)
                self.assertEqual(task.tag, name)
                self.assertEqual(
                    mixture.demonstration(task), part.demonstration(wanted)
                )

    def test_each_part_scores_its_own_tasks(self):
        mixture = environments.make(NAME)
        for index in range(6):
            task = mixture.task("train", 1, index)
            turns = episodes.demonstrated(mixture, task)
            self.assertEqual(episodes.play(mixture, task, *turns)[-1].reward.total, 1)
            wrong = episodes.play(mixture, task, "no")[-1].reward
            self.assertEqual(wrong.total, 0)

    def test_it_has_the_splits_that_all_parts_have(self):
        def make(name):
            if name.startswith("context:"):
                return context.Context(name, make)
            made = rollouts_test.Scripted(None)
            if name != "both":
                made.splits = (name,)
            return made

        for name, wanted in (
            ("both+context:5:both", ["train", "held_out"]),
            ("both+held_out", ["held_out"]),
            ("context:5:train+both", ["train"]),
        ):
            self.assertEqual(mixture_lib.Mixture(name, make).splits, wanted, name)
        with self.assertRaisesRegex(config.InputError, "no split has tasks of all"):
            mixture_lib.Mixture("train+context:5:held_out", make)

    def test_an_environment_without_a_task_closes(self):
        asyncio.run(environments.make(NAME).environment().close())

    @parameterized.parameters(
        ("reverse:3+", "names joined by"),
        ("reverse:3+reverse:3", "each part once"),
        ("0*reverse:3+gcd", "at least 1"),
        ("9999*reverse:3+9999*gcd", "add up to 19998"),
        ("reverse:3+nothing", "nothing"),
    )
    def test_wrong_ones_are_refused(self, name, message):
        with self.assertRaisesRegex(config.InputError, message):
            environments.make(name)


class AgentsTest(parameterized.TestCase):
    def test_programs_play_the_tasks_of_their_part_alone(self):
        plain = environments.make(NAME)
        self.assertFalse(protocol.has_agents(plain))
        mixture = environments.make(f"gcd+2*{AGENTS}")
        self.assertTrue(protocol.has_agents(mixture))
        names = [part.name for part in protocol.parts(mixture)]
        self.assertEqual(names, ["gcd", "agents"])
        for index in range(6):
            task = mixture.task("train", 3, index)
            part, own = protocol.part_of(mixture, task)
            self.assertEqual(part.name, task.tag)
            self.assertEqual(f"{names.index(part.name)}/{own.id}", task.id)
            is_agent = isinstance(part.environment(), protocol.Agent)
            self.assertEqual(is_agent, protocol.has_agents(part))

    def test_a_taskset_alone_is_its_own_part(self):
        taskset = environments.make("gcd")
        task = taskset.task("train", 0, 0)
        self.assertEqual(protocol.part_of(taskset, task), (taskset, task))
        self.assertEqual([*protocol.parts(taskset)], [taskset])


class Agents:
    """A taskset whose episodes programs play."""

    name = "agents"
    has_agents = True

    def task(self, split, seed, index):
        return environments.make("gcd").task(split, seed, index)

    def environment(self):
        return Program()

    def demonstration(self, task):
        return None


class Program:
    async def play(self, task, base_url):
        raise NotImplementedError

    async def close(self):
        pass


if __name__ == "__main__":
    environment.main()
