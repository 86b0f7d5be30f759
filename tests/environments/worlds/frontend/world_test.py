"""Front-end tasks: the oracle confirms the labels, and judges are compared with it."""

import asyncio
import base64
import dataclasses
import fractions
import functools
import io
import json
import pathlib
import random
import re
import sys
import time
import unittest
from unittest import mock

import pytest
from absl.testing import absltest, parameterized
from PIL import Image

from glm5_jax import config, environments
from glm5_jax.environments import browser, endpoint, proofs, tool_calls
from glm5_jax.environments.worlds.frontend import (
    draft,
    families,
    judge,
    oracle,
    rates,
    scripted,
    traces,
    world,
)
from glm5_jax.environments.worlds.frontend.projects import kit
from tests.environments import chat_server, episodes

sys.path.insert(0, str(pathlib.Path(__file__).parents[4] / "benchmarks"))

import frontend_judge

MISSING = browser.missing()
COUNTER = families.ALL["counter"]
FEW = ("start", "reset")  # items; a flaw fails the second


def small_counter(rng, names=FEW):
    """Makes a counter whose checklist has FEW items."""
    made = COUNTER(rng)
    items = tuple(item for item in made.items if item.name in names)
    flaws = tuple(flaw for flaw in made.flaws if {*flaw.fails} <= {*names})
    return dataclasses.replace(made, items=items, flaws=flaws)


def without_browser(family):
    """Returns a family's tasks, on a machine that may have no browser and no npm."""
    with (
        mock.patch.object(browser, "Browser"),
        mock.patch.object(kit, "missing", return_value=""),
    ):
        return world.Frontend(f"frontend:{family}")


class DraftsTest(parameterized.TestCase):
    @parameterized.parameters(*families.ALL)
    def test_every_number_makes_a_whole_task(self, family):
        for number in range(10):
            made = traces.draft(family, number)
            names = [item.name for item in made.items]
            self.assertGreaterEqual(len(set(names)), 8)
            self.assertLen(set(names), len(names))
            self.assertLen(made.submissions(), 1 + len(made.flaws))
            for flaw in made.flaws:
                self.assertContainsSubset(flaw.fails, names)

    @parameterized.parameters(*families.ALL, "vue_order")
    def test_what_is_held_out_is_asked_of_no_training(self, family):
        """It was where a family had few briefs: a number decided the split."""
        taskset = without_browser(family)
        asked = {
            split: {taskset.task(split, 0, n).messages[0]["content"] for n in range(60)}
            for split in ("train", "held_out")
        }
        self.assertNoCommonElements(asked["train"], asked["held_out"])
        self.assertGreater(len(asked["held_out"]), 12)
        self.assertGreater(len(asked["train"]), 30)

    def test_frameworks_hold_out_the_same_briefs(self):
        react, vue = (
            {
                traces.draft(*taskset.task(split, 0, n).answer).brief: split
                for n in range(100)
                for split in ("train", "held_out")
            }
            for taskset in map(without_browser, ("react_order", "vue_order"))
        )
        both = react.keys() & vue
        self.assertNotEmpty(both)
        for brief in both:
            self.assertEqual(react[brief], vue[brief])

    def test_the_parts_of_a_converter_are_no_ties(self):
        """A quotient such as 8.125 is rounded by the way it is computed."""
        for number in range(300):
            brief = traces.draft("converter", number).brief
            factor = fractions.Fraction(re.findall(r"\d\.\d+", brief)[0])
            for value in range(10, 90, 10):
                self.assertNotEqual(value / factor * 1000 % 10, 5, brief)

    def test_prices_of_a_table_differ(self):
        """Of equal ones the reference and the checklist had another order."""
        for number in range(1000):
            brief = traces.draft("table", number).brief
            prices = re.findall(r"\d{3}", brief)
            self.assertLen(set(prices), 5, brief)

    def test_twenty_briefs_have_a_hundred_and_fifty_items(self):
        made = [traces.draft(f, n) for f in families.ALL for n in range(2)]
        self.assertGreaterEqual(len({one.brief for one in made}), 20)
        self.assertGreaterEqual(sum(len(one.items) for one in made), 150)


class RatesTest(absltest.TestCase):
    def test_figures_are_counted(self):
        found = [
            rates.Instance("a", True, {"x": True, "y": True}, {"x": True, "y": False}),
            rates.Instance(
                "b", False, {"x": False, "y": False}, {"x": False, "y": False}
            ),
            rates.Instance("c", True, {"x": True, "y": False}),
        ]
        self.assertEqual(
            rates.summarize(found),
            {
                "submissions": 3,
                "items": 6,
                "build_success": 0.6667,
                "checklist_rate": 0.5,
                "instance_rate": 0.3333,
                "judged_checklist_rate": 0.25,
                "judged_instance_rate": 0.0,
                "agreement": 0.75,
                "spearman": 1.0,
            },
        )

    def test_spearman_has_its_closed_form(self):
        """Without ties it is 1 - 6 sum d^2 / (n (n^2 - 1))."""
        first = [float(place) for place in range(8)]
        second = random.Random(0).sample(first, 8)
        squares = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
        wanted = 1 - 6 * squares / (8 * 63)
        self.assertAlmostEqual(rates.spearman(first, second), wanted)
        # Ranks 0.5, 0.5, 2 against 0, 1, 2: 1.5 / sqrt(1.5 * 2).
        self.assertAlmostEqual(
            rates.spearman([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]), 0.75**0.5
        )
        self.assertIsNone(rates.spearman([1.0, 1.0], [1.0, 2.0]))


class PatienceTest(parameterized.TestCase):
    @parameterized.parameters((0.01, True, 2), (0.0, False, 1))
    def test_the_last_look_is_after_the_time(self, seconds, comes, num_looks):
        """A stall that takes all of the time is followed by a look."""
        looks = []

        async def look(page, where):
            looks.append(where)
            if len(looks) == 1:
                time.sleep(0.02)
                return False
            return True

        with (
            mock.patch.object(oracle, "look", look),
            mock.patch.object(oracle, "holds", lambda step, found: found),
        ):
            found = asyncio.run(oracle._comes(None, ("shows", "#a"), seconds))
        self.assertEqual((found, len(looks)), (comes, num_looks))


@unittest.skipIf(MISSING, MISSING)
class BrowserTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.world = environments.make("frontend:counter")
        cls.browser = cls.world.browser
        cls.addClassCleanup(cls.world.close)

    def decide(self, html, made):
        files = {"index.html": html.encode()}
        return asyncio.run(oracle.decide(self.browser, files, made.items))

    def use_small_counter(self, names=FEW):
        made = functools.partial(small_counter, names=names)
        self.enter_context(mock.patch.dict(families.ALL, counter=made))

    def failing(self, html, made):
        _, passed = self.decide(html, made)
        return {item for item, is_good in passed.items() if not is_good}

    @parameterized.parameters("counter", "tabs")
    def test_flaws_fail_their_items_alone(self, family):
        made, wanted = traces.draft(family, 0), set()
        html = made.page
        for flaw in made.flaws:
            html = html.replace(flaw.old, flaw.new)
            wanted |= {*flaw.fails}
        self.assertEqual(self.failing(html, made), wanted)
        if family == "tabs":  # and on the page without flaws they pass
            failed = [item for item in made.items if item.name in wanted]
            made = dataclasses.replace(made, items=tuple(failed))
            self.assertEqual(self.failing(made.page, made), set())

    @parameterized.parameters(*families.ALL)
    @pytest.mark.slow  # three minutes
    def test_the_oracle_confirms_every_label(self, family):
        for number in range(2):
            made = traces.draft(family, number)
            for name, html in made.submissions().items():
                named = set() if name == "reference" else {*name.split("+")}
                self.assertEqual(self.failing(html, made), named, (number, name))

    @parameterized.parameters(
        "<!doctype html><script>nothing()</script><p>text",
        "<!doctype html><script>while (document.body === null);</script>",
        "<!doctype html><body style='display:none'>text",
    )
    def test_what_does_not_build_passes_nothing(self, html):
        made = traces.draft("counter", 0)
        seconds = 0.7 if "while" in html else 1.5
        with mock.patch.object(oracle, "_SECONDS", seconds):
            builds, passed = self.decide(html, made)
        self.assertFalse(builds)
        self.assertFalse(any(passed.values()))

    @parameterized.parameters(
        "<p>text</p><script>onload = () => document.body.remove()</script>",
        "<p>0</p><script>onload = () => setInterval(() => location.reload(), 1)"
        "</script>",
        "<p>0</p><script>location.href = '/other'</script>",
    )
    def test_a_page_that_leaves_is_wrong_and_not_the_browser(self, html):
        made = small_counter(random.Random(0))
        _, passed = self.decide(f"<!doctype html>{html}", made)
        self.assertFalse(any(passed.values()))

    @parameterized.parameters(
        (1000.0, [("#add", 10_000), ("#sub", 10_000), ("#add", 500)]),
        (0.0, [("#add", 10_000)]),
    )
    def test_elements_that_are_missing_are_waited_for_once(self, seconds, wanted):
        """The episode of a wrong page took too long, and was left out of training."""
        made = small_counter(random.Random(0), ("add", "least", "reset"))
        waits = []

        async def act(page, step, wait):
            waits.append((step[1], wait))
            raise oracle.StepError("there is none")

        with mock.patch.object(oracle, "act", act):
            decided = oracle.decide(
                self.browser,
                {"index.html": b"<!doctype html><p>I could not do it."},
                made.items,
                seconds_to_fail=seconds,
            )
            builds, passed = asyncio.run(decided)
        self.assertTrue(builds)
        self.assertFalse(any(passed.values()))
        self.assertLen(passed, len(made.items))
        self.assertEqual(waits, wanted)

    def test_no_item_finds_what_another_left(self):
        """Neither what it stored, nor that it took the page away."""
        html = """<!doctype html><p id=n></p><a id=go href=/other>go</a><script>
        const n = document.getElementById('n');
        n.textContent = window.name || 'new';
        window.name = 'kept';
        indexedDB.databases().then(found => { if (found.length) n.textContent = 'db' });
        indexedDB.open('a', 1);
        </script>"""
        away = draft.item("away", "It goes.", "click #go; reads #n | other")
        first, second = (
            draft.item(name, "It is new.", "reads #n | new") for name in ("one", "two")
        )
        made = dataclasses.replace(traces.draft("counter", 0), items=(away, first))
        self.assertEqual(self.failing(html, made), {"away"})
        made = dataclasses.replace(made, items=(first, second))
        self.assertEqual(self.failing(html, made), set())

    def test_a_judge_opens_a_page_that_was_left(self):
        html = "<!doctype html><p>first</p><a href=/other>go</a>"

        async def play():
            hands = judge.Hands(self.browser, {"index.html": html.encode()})
            await hands.use("click", {"selector": "a"})
            opened = await hands.use("open", {})
            read = await hands.use("read", {"selector": "p"})
            await hands.close()
            return opened, json.loads(read)["text"]

        self.assertEqual(asyncio.run(play()), ("opened", "first"))

    def test_a_task_is_proven(self):
        self.use_small_counter()
        task = self.world.task("train", 0, 0)
        proof = asyncio.run(proofs.prove(self.world, task, num_repeats=1))
        self.assertEqual(proof.failures, ())

    def test_the_reward_needs_every_item(self):
        self.use_small_counter((*FEW, "add"))
        task = self.world.task("train", 0, 0)
        html = traces.draft(*task.answer).submissions()["reset"]
        write = tool_calls.turn("write", path="index.html", content=html)
        *_, last = episodes.play(self.world, task, write, tool_calls.turn("submit"))
        self.assertEqual(last.reward.total, 0.0)
        self.assertEqual(last.reward.parts, {"builds": 1.0, "checklist": 2 / 3})
        self.assertEqual(last.info["failed"], ["reset"])

    def test_judgements_are_stored_and_verified_without_the_judge(self):
        self.use_small_counter()
        made = traces.draft("counter", 0)
        html = made.submissions()["reset"]
        truth = {"start": True, "reset": False}

        async def judge_all(*rates):
            hands = judge.Hands(self.browser, {"index.html": html.encode()})
            try:
                return [
                    [
                        await judge.judge(hands, made, x, scripted.ask(x, rate, "a"))
                        for x in made.items
                    ]
                    for rate in rates
                ]
            finally:
                await hands.close()

        right, wrong = asyncio.run(judge_all(0.0, 1.0))
        for one, other in zip(right, wrong, strict=True):
            self.assertEqual(one.verdict, truth[one.item])
            self.assertEqual(other.verdict, not truth[one.item])
        trace = traces.Trace(
            "counter", 0, "reset", {"index.html": html}, True, truth, tuple(right)
        )
        folder = pathlib.Path(self.create_tempdir().full_path)
        traces.write(folder, [trace])
        (again,) = traces.read(folder)
        self.assertEqual(again.instance(), trace.instance())
        self.assertEqual(asyncio.run(traces.verify(self.browser, again)), [])
        # A stored verdict, result or truth that is not so is found.
        last = dataclasses.replace(again.judgements[0], verdict=False)
        changed = dataclasses.replace(
            again, judgements=(last,), truth={**truth, "reset": True}
        )
        self.assertEqual(
            asyncio.run(traces.verify(self.browser, changed)),
            ["truth of reset", "verdict on start"],
        )

    def test_a_model_behind_an_endpoint_sees_screenshots(self):
        """A server relays the script, which looks once more than it needs to."""
        self.use_small_counter()
        made = traces.draft("counter", 0)
        html = made.submissions()["reset"]
        truth = {"start": True, "reset": False}

        def script(messages, number):
            asked = messages[1]["content"]
            item = next(x for x in made.items if asked.endswith(x.statement))
            told = [m for m in messages if m["role"] == "tool"]
            plain = [m for m in told if not m["content"].startswith("screenshot ")]
            if item.name == "start" and len(told) == len(plain) == 1:
                turn = tool_calls.turn("screenshot")
                turn["tool_calls"][0]["id"] = "call_of_the_screenshot"
            else:
                turn = asyncio.run(scripted.ask(item, 0.0, "a")(plain, ()))
            for call in turn["tool_calls"]:  # as endpoints have it
                call["function"]["arguments"] = json.dumps(
                    call["function"]["arguments"]
                )
            return turn

        async def judge_all(ask):
            hands = judge.Hands(self.browser, {"index.html": html.encode()})
            try:
                return [
                    await judge.judge(hands, made, x, ask, sees=True)
                    for x in made.items
                ]
            finally:
                await hands.close()

        with chat_server.Server(script) as server:
            found = asyncio.run(judge_all(endpoint.ask(server.url, "judge")))
        self.assertEqual({one.item: one.verdict for one in found}, truth)
        sent = [
            part["image_url"]["url"]
            for _, body, _ in server.asked
            for message in body["messages"]
            if isinstance(message["content"], list)
            for part in message["content"]
        ]
        self.assertNotEmpty(sent)  # once in each request of the item that follows
        self.assertLen({*sent}, 1)
        start = next(one for one in found if one.item == "start")
        ((digest, png),) = start.pictures.items()
        head, _, coded = sent[0].partition(",")
        self.assertEqual(head, "data:image/png;base64")
        self.assertEqual(base64.b64decode(coded), png)
        self.assertEqual(Image.open(io.BytesIO(png)).size, (1280, 720))
        (other,) = (one for one in found if one.item != "start")
        self.assertEmpty(other.pictures)
        # What is stored has the picture beside it, and is verified without a server.
        trace = traces.Trace(
            "counter", 0, "reset", {"index.html": html}, True, truth, tuple(found)
        )
        folder = pathlib.Path(self.create_tempdir().full_path)
        traces.write(folder, [trace])
        self.assertEqual((folder / "pictures" / f"{digest}.png").read_bytes(), png)
        stored = (folder / "traces.jsonl").read_text()
        self.assertIn(f"sha256:{digest}", stored)
        self.assertNotIn("base64", stored)
        figures = asyncio.run(frontend_judge.verify(self.browser, folder))
        figures.pop("verification_seconds")
        self.assertEqual(figures, {"verified": 1, "verification_differs_in": []})

    def test_wrong_names_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "no family 'chess'.*counter"):
            environments.make("frontend:chess")


if __name__ == "__main__":
    absltest.main()
