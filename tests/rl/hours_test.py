"""Limits of minutes and hours of an orchestrator, in milliseconds and in one thread."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import time
from unittest import mock

import aiohttp
from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.rl import completer, held_out, jobs
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import failing, remote, simulator
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from tests import environment
from tests.rl import faults, orchestrator_test, remote_test, virtual_time

MINUTE, HOUR = 60.0, 3600.0
RL = config.RLConfig(max_turns=1)  # the limits of time are its defaults
Lucky = orchestrator_test.Lucky
STALL = jobs.stall_seconds(RL, Lucky())
OK = orchestrator_test.OK


def make(engine, taskset, groups, concurrency=()):
    """Returns an orchestrator with the limits that runs have."""
    settings = dataclasses.replace(
        jobs.settings(RL), max_new_tokens=16, concurrency=concurrency
    )
    context = episodes_lib.Context(
        engine, taskset, orchestrator_test.TEMPLATE, settings
    )

    def of_group(index):
        task = taskset.task("train", 0, index)
        return [episodes_lib.Job(task, index, 2 * index + i) for i in range(2)]

    return orchestrator_lib.Orchestrator(context, of_group, groups, drop_equal=False)


@contextlib.asynccontextmanager
async def playing(made):
    """Plays while the block lasts."""
    task = asyncio.create_task(made.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def remote_engine(answers):
    """Returns servers that answer as told, and when they were asked.

    Args:
      answers: returns the seconds until an answer, its status and its Retry-After.
    """
    asked, session = [], mock.Mock(spec=aiohttp.ClientSession)

    @contextlib.asynccontextmanager
    async def post(url, json, headers, timeout):
        asked.append(asyncio.get_running_loop().time())
        async with asyncio.timeout(timeout.total):
            seconds, status, wait = answers()
            await asyncio.sleep(seconds)
        yield Answer(status, {"Retry-After": wait})

    session.post = post
    limit = RL.answer_timeout_seconds
    return remote.Remote(session, "http://a:1", 512, seconds=limit), asked


class Answer:
    def __init__(self, status, headers):
        self.status, self.headers = status, headers

    async def json(self):
        (choice,) = remote_test.ANSWER["choices"]
        logprobs = {"content": [{"logprob": -0.5} for _ in OK]}
        versions = [0] * len(OK)
        of_versions = {"weight_versions": versions, "cache_versions": versions}
        said = {"token_ids": [*OK], "logprobs": logprobs, **of_versions}
        return {"choices": [choice | said]}

    async def text(self):
        return json.dumps({"error": "busy"})


class VirtualTimeTest(absltest.TestCase):
    def test_hours_pass_at_once_and_in_order(self):
        woken = []

        async def sleep(hours):
            await asyncio.sleep(hours * HOUR)
            woken.append(hours)

        async def main():
            await asyncio.gather(*map(sleep, (5, 1, 30)))
            with self.assertRaises(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), HOUR)
            return await asyncio.to_thread(len, woken)

        self.assertEqual(virtual_time.run(main()), (3, 31 * HOUR))
        self.assertEqual(woken, [1, 5, 30])

    def test_who_waits_for_nothing_is_told(self):
        with self.assertRaises(virtual_time.StuckError):
            virtual_time.run(asyncio.Event().wait())


class HoursTest(parameterized.TestCase):
    def take(self, engine, num_steps, taskset=None):
        """Returns the orchestrator after some steps, and the seconds they took."""
        made = make(engine, taskset or Lucky(), groups_lib.Groups(1, 0))

        async def main():
            async with playing(made):
                for step in range(num_steps):
                    await made.take(STALL)
                    engine.version = step + 1
                    made.published(step + 1)

        _, seconds = virtual_time.run(main())
        return made, seconds

    @parameterized.named_parameters(
        ("synchronous", 0, 4, 10 * (5 + 2)),
        ("overlapped", 1, 2, 10 * 5 + 2),  # the engine has room for one group
        ("two_groups_at_once", 1, 4, 4 * (5 + 2) + 5 + 2 + 2),
    )
    def test_what_overlap_gains(self, max_staleness, num_concurrent, wanted):
        """Answers take 5 s and a step 2 s; the simulator says the same."""
        engine = orchestrator_test.Engine(seconds=lambda: 5.0)
        groups = groups_lib.Groups(1, max_staleness)
        made = orchestrator_test.make(
            engine, Lucky(), groups, num_concurrent=num_concurrent
        )

        async def main():
            async with playing(made):
                for step in range(10):
                    await made.take(STALL)
                    await asyncio.sleep(2.0)
                    engine.version = step + 1
                    made.published(step + 1)

        _, seconds = virtual_time.run(main())
        self.assertAlmostEqual(seconds, wanted, places=6)
        speeds = simulator.Speeds(
            num_engines=1,
            slots=8,
            step_seconds=lambda n: 0.01,
            train_seconds=lambda tokens: 2.0,
            publish_seconds=0.0,
        )
        settings = simulator.Settings(
            batch_size=1,
            group_size=orchestrator_test.GROUP_SIZE,
            max_staleness=max_staleness,
            num_concurrent=num_concurrent,
            num_steps=10,
        )
        found = simulator.predict(
            lambda *_: [simulator.Turn(500, 0.0)], speeds, settings
        )
        self.assertAlmostEqual(found.seconds, seconds, places=6)

    def test_a_server_that_is_busy_for_minutes_is_waited_for(self):
        def answers():
            loop = asyncio.get_running_loop()
            return (0.0, 503, "9") if loop.time() < 3.9 * MINUTE else (1.0, 200, "0")

        engine, asked = remote_engine(answers)
        made, seconds = self.take(engine, 1)
        self.assertBetween(seconds, 3.9 * MINUTE, 4 * MINUTE)
        self.assertEqual(made.groups.ledger().get("restarted", 0), 0)
        self.assertBetween(len(asked), 2 * 47, 2 * 50)  # every 5 s, of two

    @parameterized.named_parameters(
        ("always_busy", (0.0, 503, "9")), ("never_answers", (HOUR, 200, "0"))
    )
    def test_answers_that_are_late_restart_their_group_and_end_the_run(self, answer):
        limit, (engine, _) = RL.answer_timeout_seconds, remote_engine(lambda: answer)
        made = make(engine, Lucky(), groups_lib.Groups(1, 0))

        async def main():
            async with playing(made):
                with self.assertRaisesRegex(completer.EngineError, "answer_timeout_se"):
                    await made.take(STALL)

        _, seconds = virtual_time.run(main())
        num = orchestrator_lib.MAX_FAILURES
        pauses = sum(range(1, num)) * orchestrator_lib._RETRY_SECONDS
        self.assertAlmostEqual(seconds, num * limit + pauses, delta=1e-3)
        self.assertEqual(made.groups.ledger()["restarted"], num - 1)

    def test_a_run_that_stalls_ends_after_the_longest_answer_and_call(self):
        made = make(
            orchestrator_test.Engine(lambda: faults.NEVER),
            Lucky(),
            groups_lib.Groups(1, 0),
        )

        async def main():
            async with playing(made):
                with self.assertRaisesRegex(orchestrator_lib.StalledError, "for 300 s"):
                    await made.take(STALL)

        self.assertEqual(virtual_time.run(main())[1], 300.0)

    def test_an_environment_that_hangs_costs_its_limit_and_no_more(self):
        """Of ten steps each has a group that hangs, and one in its place."""
        taskset = faults.FaultyTaskset(faults.Fault.HANG_IN_STEP, every=4)
        made, seconds = self.take(orchestrator_test.Engine(), 10, taskset)
        self.assertEqual(seconds, 10 * RL.step_timeout_seconds)
        played = made.played()
        labels = collections.Counter(e.label.value for e in played.episodes)
        self.assertEqual(labels, {"timeout": 10, "ok": 30})
        self.assertEqual(made.groups.ledger()["dropped_invalid"], 10)

    def test_a_tag_is_played_again_after_its_pause(self):
        """Its service is down for an hour; the other tag goes on."""

        class Half(Lucky):
            def task(self, split, seed, index):
                tag = "down" if index % 2 else "up"
                return dataclasses.replace(super().task(split, seed, index), tag=tag)

            def environment(self):
                made, reset = (found := super().environment()), found.reset

                async def waking(task):
                    is_down = asyncio.get_running_loop().time() < HOUR
                    if task.tag == "down" and is_down:
                        raise faults.FaultError("no service")
                    return await reset(task)

                made.reset = waking
                return made

        engine = orchestrator_test.Engine(lambda: 4 * MINUTE)
        made = make(engine, Half(), groups_lib.Groups(4, 1, max_dropped=12))
        shares = []

        async def main():
            async with playing(made):
                loop = asyncio.get_running_loop()
                for step in range(10_000):
                    taken = await made.take(STALL)
                    tags = [group[0].task.tag for _, group in taken]
                    shares.append((loop.time(), tags.count("down") / len(tags)))
                    engine.version = step + 1
                    made.published(step + 1)
                    made.groups.commit(step + 1)
                    if loop.time() > 2 * HOUR:
                        return

        virtual_time.run(main())
        before = [share for when, share in shares if when < HOUR]
        pause = failing.PAUSE_SECONDS
        after = [share for when, share in shares if when > HOUR + 2 * pause]
        self.assertEqual({*before}, {0.0})
        self.assertAlmostEqual(sum(after) / len(after), 0.5, delta=0.1)

    def test_hours_of_slow_answers_lose_nothing_and_are_the_same_twice(self):
        """Answers of seconds to minutes, and engines that fail now and then."""

        def hours():
            rng = random.Random(0)
            engine = orchestrator_test.Engine(
                seconds=lambda: rng.lognormvariate(3.0, 1.0),
                fails=lambda: rng.random() < 0.02,
            )
            made, ages = make(engine, Lucky(), groups_lib.Groups(4, 2)), []

            async def main():
                async with playing(made):
                    loop = asyncio.get_running_loop()
                    made.evaluation.begin(
                        [
                            episodes_lib.Job(
                                Lucky().task("held_out", 0, i), i, held_out.FIRST_ID + i
                            )
                            for i in range(8)
                        ],
                        0,
                    )
                    step = 0
                    while loop.time() < 5 * HOUR:
                        taken = await made.take(STALL)
                        drawn = [
                            version
                            for _, group in taken
                            for episode in group
                            for version in episode.samples[0].versions
                            if version >= 0
                        ]
                        ages.append(step - min(drawn))
                        step += 1
                        await asyncio.sleep(10 * MINUTE)  # learns
                        engine.version = step
                        made.published(step)
                        made.groups.commit(step)
                ledger = made.groups.ledger()
                self.assertEqual(ledger.pop("begun"), sum(ledger.values()))
                return ledger, ages, step

            return virtual_time.run(main())[0]

        ledger, ages, steps = hours()
        self.assertBetween(steps, 25, 30)
        self.assertEqual(ledger["done"], 4 * steps)
        self.assertGreater(ledger["restarted"], 0)
        self.assertEqual((min(ages), max(ages) <= 2), (0, True))
        self.assertEqual(hours(), (ledger, ages, steps))


class WallClockTest(parameterized.TestCase):
    """Nothing waits by the time of day, which an administrator or NTP may set."""

    @parameterized.named_parameters(
        ("a_busy_server", "busy"),
        ("a_call_that_hangs", "hangs"),
        ("engines_that_stall", "stalls"),
        ("a_pause", "pause"),
    )
    def test_jumps_by_an_hour_change_nothing(self, name):
        act = getattr(self, name)
        plain, _ = virtual_time.run(act())
        self.assertTrue(self.has_waited(name, plain), plain)
        began = time.time()
        for seed in range(4):
            rng = random.Random(seed)
            jumps = iter(lambda rng=rng: began + rng.choice((-HOUR, HOUR)), None)
            with mock.patch.object(time, "time", jumps.__next__):
                self.assertEqual(virtual_time.run(act())[0], plain)

    def has_waited(self, name, plain):
        """Returns whether a limit of time was reached, or a pause began and ended."""
        if name == "pause":
            return {False, True} == set(plain)
        seconds, said, _, ledger = plain
        return {
            "busy": seconds >= 3 * MINUTE,
            "hangs": ledger.get("dropped_invalid", 0) > 0,
            "stalls": bool(said),
        }[name]

    async def played(self, engine, taskset, num_steps=2):
        """Returns what became of some steps, and when."""
        made, said = make(engine, taskset, groups_lib.Groups(1, 1)), ""
        async with playing(made):
            try:
                for step in range(num_steps):
                    await made.take(STALL)
                    engine.version = step + 1
                    made.published(step + 1)
            except orchestrator_lib.StalledError as error:
                said = str(error)
            seconds = asyncio.get_running_loop().time()
            return seconds, said, made.figures(), made.groups.ledger()

    async def busy(self):
        def answers():
            time_of_loop = asyncio.get_running_loop().time()
            return (0.0, 503, "9") if time_of_loop < 3 * MINUTE else (2.0, 200, "0")

        return await self.played(remote_engine(answers)[0], Lucky())

    async def hangs(self):
        taskset = faults.FaultyTaskset(faults.Fault.HANG_IN_STEP, every=4)
        return await self.played(orchestrator_test.Engine(lambda: 1.0), taskset)

    async def stalls(self):
        return await self.played(
            orchestrator_test.Engine(lambda: faults.NEVER), Lucky()
        )

    async def pause(self):
        """Returns whether a tag is paused, every minute."""
        kinds, paused = failing.Failing(), []
        kinds.note("good", "")
        for _ in range(failing._OF_A_TAG):
            kinds.note("bad", "it crashed")
        for _ in range(12):
            paused.append(kinds.is_paused("bad"))
            await asyncio.sleep(MINUTE)
        return paused


class Trainer:
    """A trainer that saves every other step, and can be killed at any moment."""

    NUM_STEPS = 16

    def __init__(self, rng, taskset=Lucky, concurrency=()):
        self.rng, self.num_kills, self.ages = rng, 0, []
        self.taskset, self.concurrency = taskset, concurrency
        self.learnt: dict[int, list[int]] = {}  # by step, in its weights
        self.saved = 0, json.dumps(groups_lib.Groups(2, 2).state(0))

    async def live(self):
        """Resumes, and learns to the end; returns the groups."""
        step, state = self.saved
        self.learnt = {s: of for s, of in self.learnt.items() if s <= step}
        rng, groups = self.rng, groups_lib.Groups(2, 2, json.loads(state))
        engine = orchestrator_test.Engine(
            seconds=lambda: rng.lognormvariate(3.0, 1.0),
            fails=lambda: rng.random() < 0.02,
        )
        engine.version = step
        made = make(engine, self.taskset(), groups, self.concurrency)
        async with playing(made):
            while step < self.NUM_STEPS:
                taken = await made.take(STALL)
                drawn = [v for _, g in taken for e in g for v in e.samples[0].versions]
                self.ages.append(step - min(v for v in drawn if v >= 0))
                await asyncio.sleep(rng.uniform(0, 4 * MINUTE))  # learns
                step += 1
                self.learnt[step] = [index for index, _ in taken]
                if step % 2 == 0:
                    state = json.dumps(groups.state(step))
                    groups.commit(step)
                    await asyncio.sleep(MINUTE)  # the checkpoint is written
                    self.saved = step, state
                engine.version = step
                made.published(step)
        return groups

    async def run(self):
        """Lives until the end, some of its lives for a while only."""
        while True:
            limit = self.rng.uniform(0, 15 * MINUTE) if self.num_kills < 12 else None
            try:
                async with asyncio.timeout(limit):
                    return await self.live()
            except TimeoutError:
                self.num_kills += 1


class KillTest(parameterized.TestCase):
    @parameterized.parameters(range(3))
    def test_a_trainer_that_is_killed_at_any_moment_loses_no_group(self, seed):
        trainer = Trainer(random.Random(seed))
        groups, _ = virtual_time.run(trainer.run())
        self.assertGreater(trainer.num_kills, 3)
        self.assertEqual([*trainer.learnt], [*range(1, trainer.NUM_STEPS + 1)])
        learnt = [index for indices in trainer.learnt.values() for index in indices]
        self.assertLen(set(learnt), 2 * trainer.NUM_STEPS)
        self.assertLessEqual(max(trainer.ages), 2)
        state, ledger = groups.state(trainer.NUM_STEPS), groups.ledger()
        self.assertEqual({*range(state["next"])} - {*learnt}, {*state["again"]})
        self.assertEqual(ledger.pop("begun"), sum(ledger.values()))
        self.assertEqual(ledger["done"], 2 * trainer.NUM_STEPS)


if __name__ == "__main__":
    environment.main()
