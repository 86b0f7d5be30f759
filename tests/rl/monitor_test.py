"""Environments that pay for junk are found and paused; right answers never are."""

import asyncio
import collections
import contextlib
import dataclasses
import random
import re
import threading

from absl.testing import absltest, parameterized

from glm5_jax.environments import proofs, protocol
from glm5_jax.inference import requests
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import gateway
from glm5_jax.rl.actors import canaries, failing, levels, monitor
from glm5_jax.rl.actors import groups as groups_lib
from glm5_jax.rl.actors import orchestrator as orchestrator_lib
from tests import environment
from tests.data import templates_test
from tests.rl import hours_test, orchestrator_test, virtual_time

EVERY = 4  # groups of a tag from canary to canary
MINUTE = 60.0


class Engine(orchestrator_test.Engine):
    """Answers a question by `say`."""

    def __init__(self, say, seconds=lambda: 1.0):
        super().__init__(seconds)
        self.say = say

    async def complete(self, request):
        await self.think()
        asked = templates_test.TOKENIZER.decode(request.prompt)
        said = self.say(re.search(r"[a-z]+ \d+", asked)[0])
        ids = templates_test.ids_of(f"</think>{said}<|user|>")
        size = len(ids)
        versions = [self.version] * size
        return requests.Completion(ids, [-0.5] * size, "stop", versions)


class Shop:
    """Tasks "sound 0", "odd 1", "sound 2" ..., of a tag for each of the words."""

    name = "shop"

    def __init__(self, right, pays=None, tags=("sound", "odd"), knows=False):
        """`right` answers a question; `pays`, if given, decides for the tag "odd"."""
        self.right, self.pays, self.tags, self.knows = right, pays, tags, knows
        self.knows_wrong = True
        self.is_opaque = False  # each task's own answer is unlike all others

    def task(self, split, seed, index):
        tag = self.tags[index % len(self.tags)]
        asked = f"{tag} {index}"
        answer = (self.right(asked), index) if self.is_opaque else self.right(asked)
        messages = ({"role": "user", "content": asked},)
        return protocol.Task(asked, messages, answer, tag=tag)

    def environment(self):
        return Counter(self)

    def demonstration(self, task):
        return None

    def attempts(self, task):
        if not self.knows:
            return None
        wrong = (turns(["wrong"]), turns(["worse"])) if self.knows_wrong else ()
        return proofs.Attempts(turns([self.right(task.id)]), wrong)


class Counter:
    """An environment of a shop."""

    def __init__(self, shop):
        self._shop, self._task = shop, None

    async def reset(self, task):
        self._task = task
        return task.messages

    async def step(self, message):
        content, shop = message["content"].strip(), self._shop
        is_paid = content == shop.right(self._task.id)
        if self._task.tag == "odd" and shop.pays is not None:
            is_paid = is_paid or shop.pays(content)
        return protocol.StepResult((), protocol.Reward(float(is_paid)), True, False)

    async def close(self):
        pass


def said(text):
    return {"role": "assistant", "content": text}


def turns(texts):
    return [said(text) for text in texts]


def number_of(asked):
    return int(asked.split()[1])


def square(asked):
    return str(number_of(asked) ** 2)


def coin(share):
    """Returns what answers a question by yes or no, yes with a probability."""
    return lambda asked: "yes" if random.Random(asked).random() < share else "no"


def context_of(shop, engine=None):
    return episodes_lib.Context(
        engine or Engine(square),
        shop,
        orchestrator_test.TEMPLATE,
        episodes_lib.Settings(max_new_tokens=16, max_turns=1, num_concurrent=8),
    )


def episode(task, size):
    """Returns one that is paid: the same token again and again, if it is long."""
    rng = random.Random(0)
    tokens = [0 if size > 100 else rng.randrange(9999) for _ in range(size)]
    sample = gateway.Sample(tokens, [True] * size, [0.0] * size, [0] * size)
    reward, label = protocol.Reward(1.0), protocol.Label.OK
    text = turns([str(size)])
    return episodes_lib.Episode(
        task, 0, [sample], reward, label, 1, 0, text, "", 0, 0, ""
    )


def make(engine, shop, groups, how="pause", every=EVERY):
    context = context_of(shop, engine)

    def jobs(index):
        task = shop.task("train", 0, index)
        return [episodes_lib.Job(task, index, 2 * index + i) for i in range(2)]

    watch = monitor.Settings(quarantine=how, canary_every=every)
    return orchestrator_lib.Orchestrator(
        context, jobs, groups, drop_equal=False, watch=watch
    )


def play(engine, shop, num_steps, how="pause", every=EVERY, learns=1.0, staleness=1):
    """Returns a played orchestrator, its figures, and when steps had groups of what."""
    made = make(engine, shop, groups_lib.Groups(4, staleness), how, every)
    steps = []

    async def main():
        async with hours_test.playing(made):
            for step in range(num_steps):
                taken = await made.take(MINUTE)
                now = asyncio.get_running_loop().time()
                steps.append((now, [group[0].task.tag for _, group in taken]))
                await asyncio.sleep(learns)
                engine.version = step + 1
                made.published(step + 1)
                made.groups.commit(step + 1)
            return made.figures()

    figures, _ = virtual_time.run(main())
    ledger = collections.Counter(made.groups.ledger())
    assert ledger["begun"] == sum(ledger.values()) - ledger["begun"]
    return made, figures, steps


def of_monitor(logs):
    """Returns what was not said of a tag that starves, as one that is paused does."""
    return [r for r in logs.records if not r.getMessage().startswith("No group of")]


class PoisonTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.rng = random.Random(0)

    def half(self, junk):
        """Returns a policy that says junk for half of the odd tasks, or is right.

        It is wrong in a third of the others.
        """

        def say(asked):
            if asked.startswith("odd") and self.rng.random() < 0.5:
                return junk()
            return square(asked) if self.rng.random() < 2 / 3 else "0"

        return say

    def assert_is_found(self, shop, say, most):
        """Checks that the odd tag alone is paused, after `most` groups of it."""
        with self.assertLogs(level="WARNING") as logs:
            made, figures, steps = play(Engine(say), shop, 60)
        ledger = collections.Counter(made.groups.ledger())
        learnt = collections.Counter(tag for _, tags in steps for tag in tags)
        self.assertLessEqual(learnt["odd"] + ledger["dropped_quarantined"], most)
        self.assertGreater(ledger["dropped_quarantined"], 0)
        self.assertGreater(learnt["sound"], 150)
        self.assertEqual({len(tags) for _, tags in steps}, {4})
        (record,) = of_monitor(logs)
        words = "'odd' are skipped for 600 s, .*pays for junk: it gave the full reward "
        self.assertRegex(record.getMessage(), words)
        self.assertEqual(figures["monitor/quarantined"], 1)
        self.assertEqual(figures["monitor/wrong_paid/sound"], 0.0)
        return record.getMessage()

    def test_an_environment_that_pays_for_everything_is_found_at_once(self):
        shop = Shop(square, lambda content: True, knows=True)
        said = self.assert_is_found(shop, self.half(lambda: "0"), EVERY + 12)
        self.assertIn(
            "3 of the last 3 answers that are wrong, the last one 'wrong'", said
        )

    def test_one_of_the_wrong_answers_that_is_paid_is_found(self):
        shop = Shop(square, lambda content: content == "worse", knows=True)
        said = self.assert_is_found(shop, self.half(lambda: "0"), 2 * EVERY + 12)
        self.assertIn(
            "3 of the last 4 answers that are wrong, the last one 'worse'", said
        )

    def test_junk_that_is_paid_is_found_where_known_answers_are_not(self):
        shop = Shop(square, lambda content: content == "please", knows=True)
        said = self.assert_is_found(shop, self.half(lambda: "please"), 80)
        self.assertIn(
            "32 answers that it had paid for other tasks, the last one 'please'", said
        )

    def test_any_text_that_is_paid_is_found_where_no_answer_is_known_to_be_wrong(self):
        """As by reasoning-gym's game_of_life_halting, which compares bool(text)."""
        shop = Shop(square, bool, knows=True)
        shop.knows_wrong, shop.is_opaque = False, True
        said = self.assert_is_found(shop, square, 80)
        self.assertIn("32 answers that it had paid for other tasks", said)

    def test_junk_that_is_never_the_same_is_found(self):
        """Every answer that ends with a word is paid, and the policy has found out."""
        shop = Shop(square, lambda content: content.endswith("sure"))
        shop.is_opaque = True

        def say(asked):
            if asked.startswith("odd"):
                return f"{self.rng.randrange(10**6)} sure"
            return square(asked)

        with self.assertLogs(level="WARNING") as logs:
            made, _, steps = play(Engine(say), shop, 60)
        self.assertIn("'odd' are skipped", logs.records[0].getMessage())
        learnt = collections.Counter(tag for _, tags in steps for tag in tags)
        dropped = made.groups.ledger()["dropped_quarantined"]
        self.assertLessEqual(learnt["odd"] + dropped, 80)

    def test_few_episodes_that_are_paid_by_chance_pause_nothing(self):
        """As in benchmarks/chaos.py, which pays one of a hundred whatever it says."""
        shop = Shop(square, lambda content: self.rng.random() < 0.01, knows=True)
        with self.assertNoLogs(level="WARNING"):
            play(Engine(self.half(lambda: "0")), shop, 100, every=1)

    def test_a_tag_is_tried_again_after_its_pause(self):
        """The environment is mended after half an hour."""
        loop_time = [0.0]
        shop = Shop(square, lambda content: loop_time[0] < 30 * MINUTE, knows=True)
        right, engine = square, Engine(square, lambda: MINUTE / 2)

        def say(asked):
            loop_time[0] = asyncio.get_running_loop().time()
            return right(asked)

        engine.say = say
        with self.assertLogs(level="WARNING") as logs:
            *_, steps = play(engine, shop, 110)
        self.assertLen(of_monitor(logs), 3)  # a pause is ten minutes
        shares = [(now, tags.count("odd") / 4) for now, tags in steps]
        before = [share for now, share in shares if 15 * MINUTE < now < 30 * MINUTE]
        after = [share for now, share in shares if now > 45 * MINUTE]
        self.assertLess(sum(before) / len(before), 0.2)
        self.assertAlmostEqual(sum(after) / len(after), 0.5, delta=0.1)

    def test_finished_groups_of_a_quarantined_tag_are_dropped_and_replaced(self):
        """Steps are slow, so many are ready as the tag is found."""
        shop = Shop(square, lambda content: True, knows=True)
        with self.assertLogs(level="WARNING"):
            made, _, steps = play(
                Engine(square, lambda: 0.1), shop, 12, learns=9.0, staleness=6
            )
        ledger = made.groups.ledger()
        self.assertGreater(ledger["dropped_quarantined"], 3)
        self.assertEqual({len(tags) for _, tags in steps}, {4})
        counts = made.played().counts
        self.assertEqual(
            counts["dropped_quarantined_groups"], ledger["dropped_quarantined"]
        )

    def test_the_only_tag_is_played_on_with_an_error(self):
        shop = Shop(square, lambda content: True, tags=("odd",), knows=True)
        with self.assertLogs(level="WARNING") as logs:
            made, figures, steps = play(Engine(square), shop, 40)
        (record,) = of_monitor(logs)  # not again and again
        self.assertEqual(record.levelname, "ERROR")
        words = "Steps learn from it, as no other tag would be played"
        self.assertIn(words, record.getMessage())
        self.assertLen(steps, 40)
        self.assertNotIn("dropped_quarantined", made.groups.ledger())
        self.assertEqual(figures["monitor/quarantined"], 0)

    def test_the_run_ends_where_the_settings_say_so(self):
        shop = Shop(square, lambda content: True, knows=True)
        words = "'odd' pays for junk: .* wrong.*glm5_jax.episodes.*The same command res"
        with self.assertRaisesRegex(monitor.PoisonedError, words):
            play(Engine(square), shop, 40, how="end")

    def test_the_settings_only_say_so(self):
        shop = Shop(square, lambda content: True, knows=True)
        with self.assertLogs(level="WARNING") as logs:
            made, *_ = play(Engine(square), shop, 40, how="off")
        self.assertIn("as rl.quarantine='off'", logs.records[0].getMessage())
        self.assertNotIn("dropped_quarantined", made.groups.ledger())

    def test_groups_that_end_in_a_quarantine_have_no_canaries(self):
        shop = Shop(square, lambda content: True, knows=True)
        context, kinds = context_of(shop), failing.Failing()
        kinds.note("sound", "")

        async def main():
            made = monitor.Monitor(context, kinds, monitor.Settings(canary_every=1))
            playing = asyncio.create_task(made.run())
            for _ in range(20):
                made.note([episode(shop.task("train", 0, 1), 9)])
                await made.settle()
            playing.cancel()
            return made.figures()

        with self.assertLogs(level="WARNING"):
            figures, _ = virtual_time.run(main())
        self.assertEqual(figures, {"monitor/quarantined": 1.0} | figures)
        self.assertNotIn("monitor/wrong_paid/odd", figures)
        self.assertNotIn("monitor/same_answer/odd", figures)

    def test_without_canaries_nothing_is_played_or_paused(self):
        shop = Shop(square, lambda content: True, knows=True)
        with self.assertNoLogs(level="WARNING"):
            _, figures, _ = play(Engine(square), shop, 40, every=0)
        self.assertNotIn("monitor/wrong_paid/odd", figures)


class HonestTest(parameterized.TestCase):
    """Answers that coincide because they are right."""

    def watch(self, shop, num_steps, every=1):
        """Plays a policy that is always right; returns the figures."""
        with self.assertNoLogs(level="WARNING"):
            _, figures, _ = play(Engine(shop.right), shop, num_steps, every=every)
        return figures

    @parameterized.product(share=(0.5, 0.9), is_opaque=(False, True))
    def test_few_possible_answers_that_are_known(self, share, is_opaque):
        """By the tasks' own answers, or if these tell nothing, by right turns."""
        shop = Shop(coin(share), knows=True)
        shop.is_opaque = is_opaque
        figures = self.watch(shop, 48)
        self.assertGreater(figures["monitor/same_answer/odd"], share - 0.2)
        self.assertEqual(figures["monitor/borrowed_paid/odd"], 0.0)
        self.assertEqual(figures["monitor/wrong_paid/odd"], 0.0)

    def test_few_possible_answers_that_no_task_names(self):
        shop = Shop(coin(0.5))
        shop.is_opaque = True
        figures = self.watch(shop, 60)
        self.assertBetween(figures["monitor/borrowed_paid/odd"], 0.2, 0.8)

    def test_tasks_whose_right_answers_are_right_for_each_other(self):
        """As the programs that the same text with other examples asks for."""

        seen = set()

        class Programs(Shop):
            def environment(self):
                made = super().environment()

                async def step(message):
                    seen.add(message["content"])
                    reward = protocol.Reward(float("same" in message["content"]))
                    return protocol.StepResult((), reward, True, False)

                made.step = step
                return made

        self.watch(Programs(lambda asked: f"same {number_of(asked)}", knows=True), 48)
        self.assertIn(canaries._NONSENSE[0]["content"], seen)

    def test_one_answer_to_everything_that_is_right(self):
        """As "I cannot do this." to requests that no tool fits."""
        self.watch(Shop(lambda asked: "no"), 48)

    def test_a_task_that_comes_again_and_again(self):
        class Two(Shop):
            def task(self, split, seed, index):
                task = super().task(split, seed, index % 2)
                return dataclasses.replace(task, answer=index)

        self.watch(Two(square), 48)


class CanariesTest(absltest.TestCase):
    def play(self, shop, groups, every=1):
        """Lets canaries be played, each before the next group ends."""
        found = []

        async def main():
            made = canaries.Canaries(
                shop, every, 10.0, lambda tag, why: found.append(tag)
            )
            playing = asyncio.create_task(made.run())
            for index in range(groups):
                made.ended(shop.task("train", 0, index), None)
                await made.settle()
            playing.cancel()
            return made

        made, seconds = virtual_time.run(main())
        return made, found, seconds

    def test_they_are_rare_and_begin_at_once(self):
        class Counting(Shop):
            num_made = 0

            def environment(self):
                self.num_made += 1
                return super().environment()

        shop = Counting(square, tags=("sound",), knows=True)
        self.play(shop, 41, every=10)
        self.assertEqual(shop.num_made, 5)

    def test_groups_that_end_while_one_is_under_way_have_none(self):
        class Slow(Shop):
            num_made = 0

            def environment(self):
                made, self.num_made = super().environment(), self.num_made + 1
                step = made.step

                async def slowly(message):
                    await asyncio.sleep(10.0)
                    return await step(message)

                made.step = slowly
                return made

        shop = Slow(square, lambda content: True, tags=("odd",), knows=True)

        async def main():
            made = canaries.Canaries(shop, 1, 1e9, lambda *_: None)
            playing = asyncio.create_task(made.run())
            for index in range(10):
                made.ended(shop.task("train", 0, index), None)
                await asyncio.sleep(1.0)
            await made.settle()
            playing.cancel()

        virtual_time.run(main())
        self.assertEqual(shop.num_made, 1)

    def test_an_environment_that_hangs_costs_its_limit(self):
        class Hanging(Shop):
            def environment(self):
                made = super().environment()

                async def reset(task):
                    await asyncio.sleep(1e9)

                made.reset = reset
                return made

        made, found, seconds = self.play(Hanging(square, knows=True), 4)
        self.assertEqual((made.shares(), found, seconds), ({}, [], 40.0))

    def test_one_that_ignores_being_cancelled_costs_its_limit(self):
        """The next canaries find the junk all the same."""

        class Stubborn(Shop):
            num_made = 0

            def environment(self):
                made, self.num_made = super().environment(), self.num_made + 1

                async def hang(*_):
                    for _ in range(2):
                        with contextlib.suppress(asyncio.CancelledError):
                            await asyncio.sleep(1e9)

                if self.num_made == 1:
                    made.step = hang
                if self.num_made == 2:
                    made.close = hang
                return made

        shop = Stubborn(square, lambda content: True, tags=("odd",), knows=True)
        with self.assertLogs(level="ERROR"):  # of a call that goes on
            _, found, seconds = self.play(shop, 4)
        self.assertEqual((found, shop.num_made), (["odd"], 4))
        self.assertLess(seconds, 100.0)

    def test_attempts_that_never_come_cost_their_limit(self):
        class Silent(Shop):
            num_asked = 0

            def attempts(self, task):
                self.num_asked += 1
                if self.num_asked == 1:
                    asked.set()
                    over.wait()
                return super().attempts(task)

        asked, over, found = threading.Event(), threading.Event(), []
        shop = Silent(square, lambda content: True, tags=("odd",), knows=True)

        async def main():
            made = canaries.Canaries(shop, 1, 0.2, lambda tag, why: found.append(tag))
            playing = asyncio.create_task(made.run())
            try:
                async with asyncio.timeout(60):
                    for index in range(4):
                        made.ended(shop.task("train", 0, index), None)
                        await made.settle()
                        await asyncio.to_thread(asked.wait)
                        made._seconds = 20.0  # the others come, on any machine
            finally:
                over.set()
                playing.cancel()

        with self.assertLogs(level="WARNING") as logs:
            asyncio.run(main())
        self.assertIn("No attempts of a task", logs.output[0])
        self.assertEqual((found, shop.num_asked), (["odd"], 4))

    def test_a_run_that_ends_lets_the_environment_of_one_close(self):
        class Slow(Shop):
            num_made = num_closed = 0

            def environment(self):
                made = super().environment()
                self.num_made += 1

                async def close():
                    await asyncio.sleep(2.0)
                    self.num_closed += 1

                made.close = close
                return made

        shop = Slow(square, knows=True)

        async def main():
            made = canaries.Canaries(shop, 1, 1e9, lambda *_: None)
            made.ended(shop.task("train", 0, 0), None)
            playing = asyncio.create_task(made.run())
            await asyncio.sleep(1.0)
            playing.cancel()
            await asyncio.wait({playing})

        virtual_time.run(main())
        self.assertEqual((shop.num_made, shop.num_closed), (1, 1))

    def test_a_taskset_that_fails_is_no_finding(self):
        class Failing(Shop):
            def attempts(self, task):
                raise RuntimeError("no attempts today")

        made, found, _ = self.play(Failing(square), 100)
        self.assertEqual((made.shares(), found), ({}, []))

    def test_doing_nothing_where_that_is_right_is_no_finding(self):
        shop = Shop(lambda asked: "" if number_of(asked) % 3 else "no", knows=True)
        shop.knows_wrong = False
        made, found, _ = self.play(shop, 100)
        self.assertEqual(({*made.shares().values()}, found), ({0.0}, []))

    def test_programs_of_their_own_have_none(self):
        shop = Shop(square, lambda content: True, knows=True)
        shop.has_agents = True
        self.assertEqual(self.play(shop, 100)[0].shares(), {})

    def test_the_other_parts_of_a_mixture_have_theirs(self):
        programs = Shop(square, lambda content: True)
        programs.has_agents = True

        class Mixed(Shop):
            has_agents = True

            def part_of(self, task):
                return (programs if task.tag == "odd" else self.turns), task

        shop = Mixed(square, lambda content: True, knows=True)
        shop.turns = Shop(square, knows=True)
        made, found, _ = self.play(shop, 20)
        self.assertEqual(found, [])
        self.assertEqual({tag for tag, _ in made.shares()}, {"sound"})

    def test_borrowed_answers_must_all_be_paid(self):
        tally = canaries._Tally(canaries.BORROWED, 1)
        for _ in range(canaries.ALL_OF - 1):
            tally.note(True)
            self.assertFalse(tally.is_too_much())
        tally.note(None)
        self.assertFalse(tally.is_too_much())
        tally.note(True)
        self.assertTrue(tally.is_too_much())
        tally.note(False)
        self.assertFalse(tally.is_too_much())


class LevelTest(absltest.TestCase):
    def changes(self, values):
        level = levels.Level()
        return [i for i, value in enumerate(values) if level.note(value)]

    def test_four_times_as_much_is_a_change(self):
        rng = random.Random(0)
        usual = [rng.lognormvariate(5.0, 0.5) for _ in range(200)]
        (first, *_) = self.changes([*usual, *(4 * x for x in usual)])
        self.assertBetween(first, 200 + 8, 200 + levels.LAST)
        (first, *_) = self.changes([*usual, *(x / 4 for x in usual)])
        self.assertBetween(first, 200 + 8, 200 + levels.LAST)

    def test_a_policy_that_learns_to_think_changes_nothing(self):
        """A hundred times as long in 2,000 groups."""
        rng = random.Random(0)
        self.assertEmpty(
            self.changes(
                100 ** (i / 2000) * rng.lognormvariate(3.0, 0.5) for i in range(2000)
            )
        )

    def test_tasks_of_all_lengths_change_nothing(self):
        rng = random.Random(0)
        values = (rng.lognormvariate(5.0, 2.0) for _ in range(20_000))
        self.assertEmpty(self.changes(values))

    def test_a_change_is_told_once_by_name(self):
        shop = Shop(square)

        async def main():
            settings = monitor.Settings(canary_every=0)
            made = monitor.Monitor(context_of(shop), failing.Failing(), settings)
            task = shop.task("train", 0, 0)
            for _ in range(100):
                made.note([episode(task, 100)])
            with self.assertLogs(level="WARNING") as logs:
                for _ in range(200):
                    made.note([episode(task, 500)])
            return made, logs

        (made, logs), _ = virtual_time.run(main())
        lengths, shares = sorted(record.getMessage() for record in logs.records)
        self.assertRegex(lengths, "'sound' .*monitor/answer_tokens is .* and was 101")
        self.assertIn("monitor/compressed_to is", shares)
        self.assertEqual(made.figures()["monitor/answer_tokens/sound"], 501.0)


if __name__ == "__main__":
    environment.main()
