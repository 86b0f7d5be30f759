"""Groups are played without pause; nobody waits for ever, and nothing is lost."""

import asyncio
import collections
import dataclasses
import random
import threading
import time
from unittest import mock

from absl.testing import parameterized

from glm5_jax.environments import protocol
from glm5_jax.inference import requests
from glm5_jax.rl import completer, held_out
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl.actors import failing
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from tests import environment
from tests.data import templates_test
from tests.rl import faults, virtual_time

TEMPLATE = templates_test.template(clear=False)
OK = templates_test.ids_of("</think>OK<|user|>")
GROUP_SIZE = 2
STALL = 20.0  # seconds; everything here takes milliseconds


class Engine:
    """Answers after a time of its own; `fails` tells which requests it does not."""

    capacity = 512

    def __init__(self, seconds=lambda: 0.0, fails=lambda: False):
        self.seconds, self.fails = seconds, fails
        self.version = 0
        self.num_running = self.max_running = 0

    async def complete(self, request):
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self.think()
        finally:
            self.num_running -= 1
        if self.fails():
            raise completer.EngineError("the engine is gone")
        size = len(OK)
        return requests.Completion([*OK], [-0.5] * size, "stop", [self.version] * size)

    async def think(self):
        await asyncio.sleep(self.seconds())


class Gathering(Engine):
    """Answers nobody before `most` requests have run at once."""

    def __init__(self, most):
        super().__init__()
        self._most, self._full = most, asyncio.Event()

    async def think(self):
        if self.num_running >= self._most:
            self._full.set()
        await asyncio.wait_for(self._full.wait(), STALL)


class Lucky(faults.FaultyTaskset):
    """A taskset that pays by chance, or always the same."""

    def __init__(self, pays=lambda: 1.0, fault=faults.Fault.NONE):
        super().__init__(fault)
        self.pays = pays

    def environment(self):
        made, pays = super().environment(), self.pays
        step = made.step

        async def paid(message):
            result = await step(message)
            reward = protocol.Reward(pays())
            return protocol.StepResult(result.messages, reward, True, False)

        if self._fault is faults.Fault.NONE:
            made.step = paid
        return made


def make(engine, taskset, groups, drop_equal=False, num_concurrent=8):
    settings = episodes_lib.Settings(
        max_new_tokens=16,
        max_turns=1,
        num_concurrent=num_concurrent,
        call_timeout=STALL,
    )

    def jobs(index):
        task = taskset.task("train", 0, index)
        first = index * GROUP_SIZE
        return [
            episodes_lib.Job(task, index, first + member)
            for member in range(GROUP_SIZE)
        ]

    context = episodes_lib.Context(engine, taskset, TEMPLATE, settings)
    return orchestrator_lib.Orchestrator(context, jobs, groups, drop_equal=drop_equal)


async def learn(orchestrator, engine, num_steps):
    """Takes and publishes; returns the indices of each step, and their staleness."""
    playing = asyncio.create_task(orchestrator.run())
    steps, staleness = [], []
    try:
        for step in range(num_steps):
            taken = await orchestrator.take(STALL)
            indices = [index for index, _ in taken]
            steps.append(indices)
            oldest = min(
                version
                for _, group in taken
                for episode in group
                for version in episode.samples[0].versions
                if version >= 0
            )
            staleness.append(step - oldest)
            engine.version = step + 1
            orchestrator.published(step + 1)
            orchestrator.groups.commit(step + 1)
    finally:
        playing.cancel()
        await asyncio.wait({playing})
    return steps, staleness


async def take(orchestrator, num_steps):
    """Takes and publishes, whatever is in the groups."""
    playing = asyncio.create_task(orchestrator.run())
    try:
        for step in range(num_steps):
            await orchestrator.take(STALL)
            orchestrator.published(step + 1)
    finally:
        playing.cancel()
        await asyncio.wait({playing})


class OrchestratorTest(parameterized.TestCase):
    @parameterized.product(max_staleness=(0, 1, 3), seed=(0, 1))
    def test_every_group_is_learnt_from_once_and_none_is_too_old(
        self, max_staleness, seed
    ):
        rng = random.Random(seed)
        engine = Engine(seconds=lambda: rng.expovariate(500))
        taskset = Lucky()
        groups = groups_lib.Groups(3, max_staleness)
        steps, staleness = asyncio.run(
            learn(make(engine, taskset, groups), engine, num_steps=8)
        )
        learnt = [index for step in steps for index in step]
        self.assertLen(set(learnt), 3 * 8)
        self.assertContainsSubset(range(3 * 4), learnt)  # none is starved
        self.assertLessEqual(max(staleness), max_staleness)
        if max_staleness == 0:
            self.assertEqual(learnt, [*range(3 * 8)])
        self.assertEqual(taskset.counts.resets, taskset.counts.closes)
        ledger = groups.ledger()
        self.assertEqual(ledger["done"], 3 * 8)

    @parameterized.parameters(4, 5)
    def test_concurrency_is_bounded_by_whole_groups(self, most):
        """A group of two may begin beside one episode less than the most."""
        engine = Gathering(most)
        made = make(engine, Lucky(), groups_lib.Groups(4, 3), num_concurrent=most)
        asyncio.run(learn(made, engine, 4))
        self.assertBetween(engine.max_running, most, most + 1)

    def test_an_episode_that_ends_makes_room_at_once(self):
        """Though another one of its group still runs."""
        engine, asked = Engine(), []
        complete, third = engine.complete, asyncio.Event()

        async def noted(request):
            asked.append(request.id)
            if len(asked) == 3:
                third.set()
            if request.id == 0:
                await third.wait()
            return await complete(request)

        engine.complete = noted
        made = make(engine, Lucky(), groups_lib.Groups(1, 1), num_concurrent=2)
        steps, _ = asyncio.run(learn(made, engine, 1))
        self.assertEqual(steps, [[0]])

    def test_groups_of_an_engine_that_fails_begin_again(self):
        rng = random.Random(0)
        engine = Engine(fails=lambda: rng.random() < 0.1)
        taskset, groups = Lucky(), groups_lib.Groups(3, 2)
        orchestrator_lib._RETRY_SECONDS, before = 0.001, orchestrator_lib._RETRY_SECONDS
        self.addCleanup(setattr, orchestrator_lib, "_RETRY_SECONDS", before)
        steps, staleness = asyncio.run(
            learn(make(engine, taskset, groups), engine, num_steps=10)
        )
        learnt = [index for step in steps for index in step]
        self.assertLen(set(learnt), 30)
        self.assertContainsSubset(range(3 * 7), learnt)
        self.assertLessEqual(max(staleness), 2)
        self.assertGreater(groups.ledger()["restarted"], 0)
        self.assertEqual(taskset.counts.resets, taskset.counts.closes)

    def test_nobody_waits_for_an_episode_beside_one_that_failed(self):
        seconds, fails = iter([0.0, 60.0]), iter([True])
        engine = Engine(lambda: next(seconds, 0.0), lambda: next(fails, False))
        orchestrator = make(engine, Lucky(), groups_lib.Groups(1, 0))
        began = time.monotonic()
        asyncio.run(learn(orchestrator, engine, 1))
        self.assertLess(time.monotonic() - began, 30.0)
        self.assertEqual(orchestrator.groups.ledger()["restarted"], 1)

    def test_a_cancelled_run_lets_every_environment_close(self):
        class Slow(Lucky):
            num_closed = num_made = 0

            def environment(self):
                made = super().environment()
                self.num_made += 1
                close, seconds = made.close, 0.02 * self.num_made

                async def slowly():
                    await asyncio.sleep(seconds)
                    await close()
                    self.num_closed += 1

                made.close = slowly
                return made

        async def run(taskset):
            engine = Engine(seconds=lambda: 10.0)
            made = make(engine, taskset, groups_lib.Groups(2, 1))
            playing = asyncio.create_task(made.run())
            while engine.num_running < 8:
                await asyncio.sleep(0.01)
            playing.cancel()
            await asyncio.wait({playing})

        taskset = Slow()
        asyncio.run(run(taskset))
        self.assertEqual((taskset.num_made, taskset.num_closed), (8, 8))

    def test_an_engine_that_always_fails_ends_the_run(self):
        engine = Engine(fails=lambda: True)
        orchestrator_lib._RETRY_SECONDS, before = 0.001, orchestrator_lib._RETRY_SECONDS
        self.addCleanup(setattr, orchestrator_lib, "_RETRY_SECONDS", before)
        taskset = Lucky()
        run = learn(make(engine, taskset, groups_lib.Groups(2, 1)), engine, 1)
        with self.assertRaisesRegex(completer.EngineError, "the engine is gone"):
            asyncio.run(run)
        self.assertEqual(taskset.counts.resets, taskset.counts.closes)

    def test_failures_in_a_row_are_counted(self):
        """Seven are borne, again and again, with longer and longer waits; eight not."""
        most = 8

        def play(*attempts):
            flags = [flag for flag in attempts for _ in range(GROUP_SIZE)]
            flags = iter([*flags, *[False] * 1000])
            engine, groups = Engine(fails=lambda: next(flags)), groups_lib.Groups(1, 0)
            made = make(engine, Lucky(), groups, num_concurrent=1)
            began = time.monotonic()
            asyncio.run(learn(made, engine, 2))
            return groups.ledger()["restarted"], time.monotonic() - began

        with mock.patch.object(orchestrator_lib, "_RETRY_SECONDS", 0.01):
            seven = [True] * (most - 1)
            restarted, seconds = play(*seven, False, *seven, False)
            self.assertEqual(restarted, 2 * (most - 1))
            self.assertBetween(seconds, 2 * 0.01 * sum(range(most)), 30)
            with self.assertRaises(completer.EngineError):
                play(*seven, True, False)
        self.assertEqual(orchestrator_lib._RETRY_SECONDS, 0.5)

    def test_groups_that_fail_at_once_are_one_failure(self):
        """As when an engine is lost while many groups are played."""
        groups = groups_lib.Groups(12, 1)
        engine = Gathering(12 * GROUP_SIZE)
        engine.fails = lambda: not groups.ledger().get("restarted")
        made = make(engine, Lucky(), groups, num_concurrent=12 * GROUP_SIZE)
        with mock.patch.object(orchestrator_lib, "_RETRY_SECONDS", 0.5):
            steps, _ = asyncio.run(learn(made, engine, 2))
        self.assertLen({i for step in steps for i in step}, 24)
        self.assertGreaterEqual(groups.ledger()["restarted"], 12)

    def test_no_group_begins_while_one_waits_to_begin_again(self):
        """Else groups that begin on a lost engine would count as failures in a row."""
        end = time.monotonic() + 0.3
        engine = Engine(fails=lambda: time.monotonic() < end)
        made = make(engine, Lucky(), groups_lib.Groups(8, 4), num_concurrent=16)
        with mock.patch.object(orchestrator_lib, "_RETRY_SECONDS", 0.05):
            steps, _ = asyncio.run(learn(made, engine, 2))
        self.assertLen({i for step in steps for i in step}, 16)

    def test_groups_from_before_a_success_do_not_count_again(self):
        async def play():
            made = make(Engine(), Lucky(), groups_lib.Groups(1, 0))
            made._num_failures, made._epoch = 0, 7  # seven failures, then a success
            error = completer.EngineError("gone")
            for _ in range(9):
                await made._failed(error, epoch=6)  # of groups that began before
            return made._num_failures

        with mock.patch.object(orchestrator_lib, "_RETRY_SECONDS", 0.001):
            self.assertEqual(asyncio.run(play()), 0)

    def test_equal_rewards_are_replaced_and_counted(self):
        rng, engine = random.Random(1), Engine()
        groups = groups_lib.Groups(2, 1)
        made = make(
            engine, Lucky(lambda: float(rng.random() < 0.5)), groups, drop_equal=True
        )
        steps, _ = asyncio.run(learn(made, engine, 6))
        self.assertLen({i for step in steps for i in step}, 12)
        ledger, (played, unused, counts) = groups.ledger(), made.played()
        self.assertLen(unused, GROUP_SIZE * ledger["dropped_equal"])
        learnt = [i for step in steps for i in step]
        for episode in unused:
            self.assertNotIn(episode.group, learnt)
        self.assertGreater(ledger["dropped_equal"], 0)
        self.assertEqual(counts["dropped_equal_groups"], ledger["dropped_equal"])
        self.assertEqual(counts["groups"] * GROUP_SIZE, len(played))
        self.assertEqual(made.played(), ([], [], {}))

    def test_engines_are_idle_while_nobody_asks(self):
        names = "seconds", "share"

        async def play():
            made = make(Engine(), Lucky(), groups_lib.Groups(1, 0))
            watched = made._engine
            with mock.patch.object(orchestrator_lib.time, "monotonic") as clock:
                clock.return_value = watched._changed = watched._measured = 10.0

                async def complete(request):
                    clock.return_value += 3.0
                    return requests.Completion([], [], "stop")

                watched._engine.complete = complete
                clock.return_value += 1.0
                await watched.complete(requests.Request(0, [1], 1))
                clock.return_value += 2.0
                first = made.figures()
                clock.return_value += 5.0
                return first, made.figures(), made.figures()

        found = asyncio.run(play())
        idle = [[f[f"actors/engines_idle_{n}"] for n in names] for f in found]
        self.assertEqual(idle, [[3.0, 0.5], [5.0, 1.0], [0.0, 0.0]])

    def test_a_trainer_without_groups_waits(self):
        async def play():
            made = make(Engine(), Lucky(), groups_lib.Groups(1, 0))
            with mock.patch.object(orchestrator_lib.time, "monotonic") as clock:
                clock.return_value, batches = 10.0, [[], None, []]

                def ready():
                    clock.return_value += 4.0
                    asyncio.get_running_loop().call_soon(made._tell)
                    return batches.pop()

                made._ready = ready
                await made.take(STALL)
                first = made.figures()
                await made.take(STALL)
                return first, made.figures(), made.figures()

        found = asyncio.run(play())
        waited = [figures["actors/trainer_waited_seconds"] for figures in found]
        self.assertEqual(waited, [4.0, 8.0, 0.0])

    def test_an_evaluation_goes_on_while_steps_take_their_groups(self):
        """Its tokens have the versions that drew them, and a second one must wait."""
        playing, may_end = asyncio.Event(), asyncio.Event()

        class Waiting(Engine):
            async def complete(self, request):
                is_held_out = request.id >= held_out.FIRST_ID
                if is_held_out and request.id % 2 and not may_end.is_set():
                    playing.set()
                    await may_end.wait()
                return await super().complete(request)

        engine, taskset = Waiting(), Lucky()
        jobs = [
            episodes_lib.Job(taskset.task("held_out", 0, i), i, held_out.FIRST_ID + i)
            for i in range(4)
        ]

        async def run():
            made = make(engine, taskset, groups_lib.Groups(1, 1))
            beside, task = made.evaluation, asyncio.create_task(made.run())
            self.assertTrue(beside.begin(jobs, 0))
            async with asyncio.timeout(60):
                await playing.wait()
                for step in range(3):
                    await made.take(STALL)
                    engine.version = step + 1
                    made.published(step + 1)
                self.assertIsNone(beside.taken())
                with self.assertLogs(level="WARNING") as logs:
                    self.assertFalse(beside.begin(jobs, 3))
                self.assertIn("version 0 is still under way", logs.output[0])
                may_end.set()
                while (found := beside.taken()) is None:
                    await asyncio.sleep(0.001)
                self.assertTrue(beside.begin(jobs, 3))
            task.cancel()
            await asyncio.wait({task})
            return found

        found = asyncio.run(run())
        self.assertEqual([e.group for e in found.episodes], [0, 1, 2, 3])
        figures = held_out.mixed_figures(found)
        self.assertEqual(figures["eval/success"], 1.0)
        names = "eval/version", "eval/version_last", "eval/version_share"
        self.assertEqual([figures[name] for name in names], [0, 3, 0.5])

    def test_an_evaluation_is_given_up_with_its_engine(self):
        fails = []
        engine, taskset = Engine(fails=lambda: bool(fails)), Lucky()
        job = episodes_lib.Job(taskset.task("held_out", 0, 0), 0, held_out.FIRST_ID)

        async def run():
            made = make(engine, taskset, groups_lib.Groups(1, 0))
            task = asyncio.create_task(made.evaluation.run())
            fails.append(True)
            made.evaluation.begin([job], 0)
            with self.assertLogs(level="WARNING") as logs:
                async with asyncio.timeout(60):
                    while not made.evaluation.begin([job], 1):
                        await asyncio.sleep(0.001)
            self.assertIn("The evaluation of version 0 is given up", str(logs.output))
            self.assertIsNone(made.evaluation.taken())
            task.cancel()
            await asyncio.wait({task})

        asyncio.run(run())

    def test_fewer_episodes_run_than_may_if_their_texts_are_lost(self):
        async def play():
            engine = Engine(seconds=lambda: 0.001)
            made = make(engine, Lucky(), groups_lib.Groups(4, 3), num_concurrent=16)
            made.window.limit = 4  # as after some losses
            await learn(made, engine, num_steps=4)
            return made, engine.max_running

        made, most = asyncio.run(play())
        self.assertBetween(most, GROUP_SIZE, 4)
        self.assertEqual(made.figures()["actors/most_episodes"], 4)
        self.assertEqual(made.window._firsts, set())

    def test_a_turn_whose_text_was_lost_is_noted(self):
        async def play():
            made = make(Engine(), Lucky(), groups_lib.Groups(1, 0))
            made.window.began(500)
            for prompt in ([1], [1] * 500):
                request = requests.Request(len(prompt), prompt, 1)
                await made._engine.complete(request)
            before = made.figures()["actors/reread_share"]
            request = requests.Request(501, [*[1] * 500, *OK, 2], 1)
            await made._engine.complete(request)
            return before, made.figures()["actors/reread_share"]

        before, after = asyncio.run(play())
        self.assertEqual(before, 0)
        self.assertAlmostEqual(after, 1 - 64 / (500 + len(OK) - 1), places=4)

    def test_the_ledger_closes_after_every_step(self):
        rng, engine = random.Random(2), Engine(seconds=lambda: rng.expovariate(500))
        groups = groups_lib.Groups(2, 2)
        made = make(
            engine, Lucky(lambda: float(rng.random() < 0.5)), groups, drop_equal=True
        )
        publish = made.published

        def published(version):
            publish(version)
            ledger = collections.Counter(groups.ledger())
            begun = ledger.pop("begun")
            self.assertEqual(begun, sum(ledger.values()), ledger)

        made.published = published
        asyncio.run(learn(made, engine, 6))

    @parameterized.parameters(0, 2)
    def test_groups_that_old_weights_drew_are_replaced(self, max_staleness):
        """As where a server answers that has missed versions."""
        rng, engine = random.Random(3), Engine()
        complete = engine.complete

        async def late(request):
            completion = await complete(request)
            if engine.version > max_staleness and rng.random() < 0.2:
                too_old = engine.version - max_staleness - 1
                fresh = [engine.version] * (len(OK) - 1)
                completion.cache_versions = [too_old, *fresh]
            return completion

        engine.complete = late
        groups = groups_lib.Groups(2, max_staleness)
        made = make(engine, Lucky(), groups)
        taken, take = [], made.take

        async def noted(seconds):
            taken.append(await take(seconds))
            return taken[-1]

        made.take = noted
        asyncio.run(learn(made, engine, 8))
        for version, batch in enumerate(taken):
            oldest = [
                min(episode.samples[0].cache_versions[-len(OK) :])
                for _, group in batch
                for episode in group
            ]
            self.assertLen(oldest, 2 * GROUP_SIZE)
            self.assertGreaterEqual(min(oldest), version - max_staleness)
        ledger, played = collections.Counter(groups.ledger()), made.played()
        self.assertGreater(ledger["dropped_stale"], 0)
        self.assertEqual(played.counts["dropped_stale_groups"], ledger["dropped_stale"])
        self.assertLen(played.unused, GROUP_SIZE * ledger["dropped_stale"])
        begun = ledger.pop("begun")
        self.assertEqual(begun, sum(ledger.values()))

    def test_crashed_environments_are_dropped_and_named(self):
        engine, groups = Engine(), groups_lib.Groups(1, 0)
        taskset = faults.FaultyTaskset(faults.Fault.CRASH_IN_STEP, every=5)
        steps, _ = asyncio.run(learn(make(engine, taskset, groups), engine, 8))
        self.assertLen({i for step in steps for i in step}, 8)
        self.assertGreater(groups.ledger()["dropped_invalid"], 0)

    @parameterized.named_parameters(
        ("environment", faults.Fault.CRASH_IN_RESET),
        ("reward", faults.Fault.REWARD_RAISES),
    )
    def test_a_kind_of_task_that_always_fails_is_paused(self, fault):
        class Half(Lucky):
            """Tasks of two tags, of which one fails."""

            def task(self, split, seed, index):
                tag = "bad" if index % 2 else "good"
                return dataclasses.replace(super().task(split, seed, index), tag=tag)

            def environment(self):
                made = super().environment()
                plain = made.reset

                async def reset(task):
                    if task.tag == "bad":
                        made._fault = fault
                    return await plain(task)

                made.reset = reset
                return made

        engine, groups = Engine(), groups_lib.Groups(4, 1, max_dropped=12)
        made = make(engine, Half(), groups)
        steps, _ = asyncio.run(learn(made, engine, 20))
        self.assertEqual({len(step) for step in steps}, {4})
        ledger = collections.Counter(groups.ledger())
        self.assertBetween(ledger["dropped_invalid"], 16, 16 + 8)
        self.assertGreater(ledger["dropped_paused"], 30)
        self.assertEqual(made.figures()["actors/steps_without_group"], 20)
        begun = ledger.pop("begun")
        self.assertEqual(begun, sum(ledger.values()))

    def test_a_run_all_of_whose_environments_fail_ends(self):
        engine, groups = Engine(), groups_lib.Groups(4, 1, max_dropped=12)
        taskset = faults.FaultyTaskset(faults.Fault.CRASH_IN_RESET)
        with self.assertRaisesRegex(failing.FailingError, "crash in reset"):
            asyncio.run(take(make(engine, taskset, groups), 100))
        self.assertBetween(groups.ledger()["dropped_invalid"], 64, 64 + 8)

    def test_a_silent_engine_is_reported(self):
        engine = Engine(seconds=lambda: faults.NEVER)
        taskset = Lucky()
        made = make(engine, taskset, groups_lib.Groups(1, 0))

        async def run():
            playing = asyncio.create_task(made.run())
            try:
                await made.take(0.05)
            finally:
                playing.cancel()
                await asyncio.wait({playing})

        words = (
            "no episode has advanced for 0.05 s: 2 episodes .* 2 wait for an engine, "
            "the oldest for 0 s"
        )
        with self.assertRaisesRegex(orchestrator_lib.StalledError, words):
            virtual_time.run(run())
        self.assertEqual(taskset.counts.resets, taskset.counts.closes)

    def test_a_taskset_that_hangs_is_reported(self):
        engine, taskset = Engine(), Lucky()
        hanging, over = threading.Event(), threading.Event()
        clock, task = mock.Mock(monotonic=mock.Mock(return_value=0.0)), taskset.task

        def hangs(split, seed, index):
            if index:
                clock.monotonic.return_value += 7.0
                hanging.set()
                over.wait(30)
            return task(split, seed, index)

        taskset.task = hangs
        groups = groups_lib.Groups(1, 0)
        made = make(engine, taskset, groups)

        async def run():
            playing = asyncio.create_task(made.run())
            try:
                await made.take(30)
                made.published(1)
                await asyncio.to_thread(hanging.wait, 30)
                await made.take(0.3)
            finally:
                over.set()
                playing.cancel()
                await asyncio.wait({playing})

        words = "no episode has advanced .* has been making group 1's task for 7 s"
        with (
            mock.patch.object(orchestrator_lib, "time", clock),
            self.assertRaisesRegex(orchestrator_lib.StalledError, words),
        ):
            asyncio.run(run())

    def test_a_taskset_without_a_task_ends_the_run(self):
        engine, taskset = Engine(), Lucky()
        taskset.task = lambda *_: 1 / 0
        with self.assertRaises(ZeroDivisionError):
            asyncio.run(
                learn(make(engine, taskset, groups_lib.Groups(1, 0)), engine, 1)
            )


if __name__ == "__main__":
    environment.main()
