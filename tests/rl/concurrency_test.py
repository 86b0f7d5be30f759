"""Parts of a mixture with a bound of episodes under way, by a virtual clock."""

import asyncio
import collections
import dataclasses
import json
import random

from absl.testing import parameterized

from glm5_jax import config
from glm5_jax.rl import at_once, jobs
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from tests import environment
from tests.rl import faults, hours_test, orchestrator_test, virtual_time

QUICK, SLOW = TAGS = "quick", "slow"
BOUND = 4  # episodes of the slow part, which are two groups
SECONDS = 50.0  # of one of them
STALL = hours_test.STALL


class Two(orchestrator_test.Lucky):
    """Tasks of two parts in turn, whose environments take their times."""

    def __init__(self, slow=lambda: SECONDS, quick=lambda: 1.0):
        super().__init__()
        self.seconds = dict(zip(TAGS, (quick, slow), strict=True))
        self.under_way, self.most = collections.Counter(), collections.Counter()
        self.most_of_all = 0
        self.begun: list[str] = []  # tags of episodes

    def task(self, split, seed, index):
        task, part = super().task(split, seed, index), index % 2
        return dataclasses.replace(task, id=f"{part}/{task.id}", tag=TAGS[part])

    def environment(self):
        made, tag = super().environment(), ""
        reset, step, close = made.reset, made.step, made.close

        async def begin(task):
            nonlocal tag
            tag = task.tag
            self.begun.append(tag)
            self.under_way[tag] += 1
            self.most[tag] = max(self.most[tag], self.under_way[tag])
            self.most_of_all = max(self.most_of_all, self.under_way.total())
            return await reset(task)

        async def answer(message):
            await asyncio.sleep(self.seconds[tag]())
            return await step(message)

        async def end():
            self.under_way[tag] -= 1
            await close()

        made.reset, made.step, made.close = begin, answer, end
        return made


def make(engine, taskset, groups, concurrency=(0, BOUND)):
    return hours_test.make(engine, taskset, groups, concurrency)


class Learnt:
    """What the steps of a run took."""

    def __init__(self):
        self.tags: list[str] = []  # of groups, in their order
        self.ages: list[int] = []  # of the oldest token of each group
        self.versions: list[int] = []  # behind, as groups.py says of each group
        self.waiting: list[int] = []  # groups that wait, as each step takes its own


async def learn(made, engine, num_steps, seconds=30.0):
    """Returns what the steps took, and the seconds until the last had its groups."""
    learnt, loop = Learnt(), asyncio.get_running_loop()
    async with hours_test.playing(made):
        for step in range(num_steps):
            taken = await made.take(STALL)
            learnt.waiting.append(len(made.places.waiting))
            for index, group in taken:
                learnt.tags.append(group[0].task.tag)
                drawn = [v for e in group for v in e.samples[0].versions if v >= 0]
                learnt.ages.append(step - min(drawn))
                learnt.versions.append(made.groups.staleness([index]))
            if step + 1 == num_steps:
                return learnt, loop.time()
            await asyncio.sleep(seconds)
            engine.version = step + 1
            made.published(step + 1)
            made.groups.commit(step + 1)
    raise AssertionError("the last step returns")


class ConcurrencyTest(parameterized.TestCase):
    @parameterized.parameters(0, 1, 3)
    def test_a_slow_part_keeps_its_bound_and_its_share(self, max_staleness):
        """It sets the pace; no group of it is lost for its age, or is older than so."""
        num_steps, batch_size = 16, 4
        engine, taskset = orchestrator_test.Engine(), Two()
        groups = groups_lib.Groups(batch_size, max_staleness)
        made = make(engine, taskset, groups)
        learning = learn(made, engine, num_steps)
        (learnt, seconds), _ = virtual_time.run(learning)
        self.assertEqual(taskset.most[SLOW], BOUND)
        num_slow = learnt.tags.count(SLOW)
        self.assertLen(learnt.tags, num_steps * batch_size)
        # Half of all groups that begin are slow, and few have begun and not been taken.
        num_open = (max_staleness + 1) * batch_size
        self.assertAlmostEqual(num_slow, len(learnt.tags) / 2, delta=num_open / 2)
        ledger = groups.ledger()
        self.assertEqual(ledger.get("dropped_stale", 0), 0)
        self.assertEqual(ledger.pop("begun"), sum(ledger.values()))
        self.assertLessEqual(max(learnt.ages), max_staleness)
        # Two groups at once, without a pause between them.
        rounds = num_slow * orchestrator_test.GROUP_SIZE / BOUND
        pauses = 30.0 * (num_steps - 1) if max_staleness == 0 else 0.0
        least = rounds * SECONDS
        self.assertBetween(seconds, least, least + pauses + SECONDS)
        if max_staleness:
            self.assertGreater(max(learnt.waiting), 0)

    def test_a_group_that_waited_is_as_old_as_its_first_token(self):
        """Else steps would wait for groups that have not begun."""
        engine, groups = orchestrator_test.Engine(), groups_lib.Groups(4, 3)
        made = make(engine, Two(), groups)
        (learnt, _), _ = virtual_time.run(learn(made, engine, 16))
        self.assertGreater(max(learnt.waiting), 2)
        self.assertEqual(learnt.versions, learnt.ages)

    def test_groups_of_other_parts_begin_past_one_that_waits(self):
        taskset = Two(slow=lambda: faults.NEVER)
        groups = groups_lib.Groups(12, 0)
        made = make(orchestrator_test.Engine(), taskset, groups, (0, 3))

        async def main():
            async with hours_test.playing(made):
                await asyncio.sleep(30.0)
                return made.figures(), made.places.of_tags

        (figures, of_tags), _ = virtual_time.run(main())
        # One of 6 slow groups fits a bound of 3, and all 6 quick ones have ended.
        self.assertEqual(taskset.begun.count(SLOW), 2)
        self.assertEqual(taskset.begun.count(QUICK), 12)
        self.assertEqual(made.groups.ledger()["ready"], 6)
        self.assertEqual(of_tags, {QUICK: 0, SLOW: 2})
        self.assertEqual(figures["actors/waiting_groups"], 5)
        self.assertEqual(figures["actors/episodes/slow"], 2)
        self.assertEqual(figures["actors/episodes/quick"], 0)

    def test_an_episode_that_ends_makes_room_at_once(self):
        seconds = iter((10.0, 50.0))  # of the first group; its places are 3
        taskset = Two(slow=lambda: next(seconds, 20.0))
        groups = groups_lib.Groups(4, 0)
        made = make(orchestrator_test.Engine(), taskset, groups, (0, 3))

        async def main():
            async with hours_test.playing(made):
                await asyncio.sleep(5.0)
                before = taskset.begun.count(SLOW)
                await asyncio.sleep(6.0)
                return before, taskset.begun.count(SLOW), taskset.most[SLOW]

        self.assertEqual(virtual_time.run(main())[0], (2, 4, 3))

    def test_a_run_that_stalls_tells_of_groups_that_wait(self):
        engine = orchestrator_test.Engine(lambda: faults.NEVER)
        made = make(engine, Two(), groups_lib.Groups(8, 0))

        async def main():
            async with hours_test.playing(made):
                await made.take(STALL)

        words = "12 episodes are under way, 12 wait .* 'running': 8}, of which 2 wait"
        with self.assertRaisesRegex(orchestrator_lib.StalledError, words):
            virtual_time.run(main())

    def test_groups_that_wait_are_skipped_while_their_tag_is_paused(self):
        """As its service is down for half an hour; then it has its share again."""

        class Down(Two):
            def environment(self):
                made, reset = (found := super().environment()), found.reset

                async def failing(task):
                    found = await reset(task)
                    is_down = asyncio.get_running_loop().time() < 30 * 60.0
                    if task.tag == SLOW and is_down:
                        await asyncio.sleep(20.0)
                        raise faults.FaultError("no service")
                    return found

                made.reset = failing
                return made

        engine, taskset, shares = orchestrator_test.Engine(), Down(), []
        groups = groups_lib.Groups(4, 2, max_dropped=16)
        made = make(engine, taskset, groups)

        async def main():
            loop = asyncio.get_running_loop()
            async with hours_test.playing(made):
                for step in range(10_000):
                    taken = await made.take(STALL)
                    tags = [group[0].task.tag for _, group in taken]
                    shares.append((loop.time(), tags.count(SLOW), len(tags)))
                    await asyncio.sleep(30.0)
                    engine.version = step + 1
                    made.published(step + 1)
                    made.groups.commit(step + 1)
                    if loop.time() > 2 * 3600.0:
                        return

        virtual_time.run(main())
        ledger = groups.ledger()
        self.assertGreater(ledger["dropped_paused"], 20)
        self.assertGreaterEqual(ledger["dropped_invalid"], 16)
        self.assertEqual(ledger.pop("begun"), sum(ledger.values()))
        self.assertEqual(taskset.most[SLOW], BOUND)
        self.assertEqual({slow for when, slow, _ in shares if when < 30 * 60.0}, {0})
        late = [(slow, of) for when, slow, of in shares if when > 3600.0]
        slow, of = map(sum, zip(*late, strict=True))
        self.assertAlmostEqual(slow / of, 0.5, delta=0.05)

    def test_a_run_that_ends_begins_those_that_wait_first_the_next_time(self):
        engine, taskset = orchestrator_test.Engine(), Two()
        groups = groups_lib.Groups(8, 1)

        async def main():
            async with hours_test.playing(make(engine, taskset, groups)) as task:
                await asyncio.sleep(30.0)
            self.assertTrue(task.cancelled())

        virtual_time.run(main())
        self.assertEqual(taskset.under_way, {QUICK: 0, SLOW: 0})
        again = groups.state(0)["again"]
        self.assertEqual(again, [*range(16)])
        resumed = groups_lib.Groups(8, 1, groups.state(0))
        self.assertEqual([resumed.begin() for _ in again], again)

    @parameterized.parameters(range(4))
    def test_hours_of_anything_lose_no_group_and_keep_every_bound(self, seed):
        """Engines that fail, slow and quick answers, and a bound for both parts."""
        rng = random.Random(seed)
        bounds = rng.choice(((2, 3), (6, 2), (0, 2), (5, 5)))
        engine = orchestrator_test.Engine(
            seconds=lambda: rng.lognormvariate(2.0, 1.0),
            fails=lambda: rng.random() < 0.02,
        )
        taskset = Two(lambda: rng.uniform(0, 59), lambda: rng.uniform(0, 20))
        max_staleness = rng.randrange(3)
        groups = groups_lib.Groups(4, max_staleness)
        made = make(engine, taskset, groups, bounds)
        (learnt, _), _ = virtual_time.run(learn(made, engine, 20))
        self.assertLen(learnt.tags, 80)
        self.assertLessEqual(max(learnt.ages), max_staleness)
        for tag, bound in zip(TAGS, bounds, strict=True):
            self.assertLessEqual(taskset.most[tag], bound or 1000)
        self.assertEqual(set(taskset.under_way.values()), {0})
        ledger = groups.ledger()
        self.assertEqual(ledger.pop("begun"), sum(ledger.values()))
        self.assertEqual(ledger.get("dropped_stale", 0), 0)
        num_open = 4 * (max_staleness + 1)
        self.assertAlmostEqual(learnt.tags.count(SLOW), 40, delta=num_open / 2)


class KillTest(parameterized.TestCase):
    @parameterized.parameters(range(2))
    def test_a_trainer_that_is_killed_loses_no_group_that_waits(self, seed):
        trainer = hours_test.Trainer(random.Random(seed), Two, (0, 2))
        groups, _ = virtual_time.run(trainer.run())
        self.assertGreater(trainer.num_kills, 3)
        learnt = [index for indices in trainer.learnt.values() for index in indices]
        self.assertLen(set(learnt), 2 * trainer.NUM_STEPS)
        state = groups.state(trainer.NUM_STEPS)
        self.assertEqual({*range(state["next"])} - {*learnt}, {*state["again"]})
        json.dumps(state)


class AtOnceTest(parameterized.TestCase):
    def played(self, concurrency, num_concurrent=8):
        taskset = Two()
        rl = dataclasses.replace(jobs.settings(hours_test.RL), max_new_tokens=16)
        settings = dataclasses.replace(
            rl, num_concurrent=num_concurrent, concurrency=concurrency
        )
        context = episodes_lib.Context(
            orchestrator_test.Engine(), taskset, orchestrator_test.TEMPLATE, settings
        )
        todo = [
            episodes_lib.Job(taskset.task("held_out", 0, i), i, i) for i in range(16)
        ]
        found, seconds = virtual_time.run(at_once.run_all(context, todo))
        self.assertEqual([episode.group for episode in found], [*range(16)])
        return taskset, seconds

    @parameterized.parameters(
        ((), 4, 8, SECONDS + 4),
        ((0, 8), 4, 8, SECONDS + 4),
        ((0, 2), 6, 2, 4 * SECONDS),
        ((1, 2), 1, 2, 4 * SECONDS),
    )
    def test_evaluations_have_the_same_bounds(self, bounds, quick, slow, seconds):
        taskset, found = self.played(bounds)
        self.assertEqual(taskset.most, {QUICK: quick, SLOW: slow})
        self.assertEqual(found, seconds)

    def test_one_bound_is_that_of_a_taskset_alone(self):
        taskset, _ = self.played((3,))
        self.assertEqual(taskset.most_of_all, 3)


class ConfigTest(parameterized.TestCase):
    @parameterized.parameters(
        ("gcd", (), ()),
        ("gcd", (8,), (8,)),
        ("2*reverse:3+gcd", (0, 8), (0, 8)),
    )
    def test_bounds_of_a_run(self, name, bounds, wanted):
        rl = config.RLConfig(environment=name, group_size=8, concurrency=bounds)
        self.assertEqual(jobs.settings(rl).concurrency, wanted)

    @parameterized.parameters(
        ("gcd", (8, 8), "each of the 1 parts"),
        ("2*reverse:3+gcd", (8,), r"each of the 2 parts of environment='2\*reverse"),
        ("2*reverse:3+gcd", (8, 7), r"at least group_size=8, .* got \(8, 7\)"),
        ("2*reverse:3+gcd", (-1, 8), r"got \(-1, 8\)"),
    )
    def test_wrong_ones_are_refused(self, name, bounds, message):
        with self.assertRaisesRegex(config.InputError, message):
            config.RLConfig(environment=name, group_size=8, concurrency=bounds)


if __name__ == "__main__":
    environment.main()
