"""Web pages in a confined browser, which reaches nothing else; scripts solve them."""

import asyncio
import importlib.util
import unittest
from unittest import mock

import pytest
from absl.testing import parameterized

from glm5_jax import config, environments
from glm5_jax.environments import browser, proofs, tool_calls
from glm5_jax.environments.worlds.miniwob import oracles, page, world
from glm5_jax.environments.worlds.miniwob.page import Element
from tests import environment
from tests.environments import episodes

HAS_PAGES = importlib.util.find_spec("miniwob") is not None
REASON = browser.missing() or ("" if HAS_PAGES else "miniwob is not installed")


def element(kind, text):
    return Element(kind, text, "", False)


class OraclesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("click-link", 'Click on the link "ut".', ["a: in", "a: ut"], [1]),
        ("click-test-2", "Click button ONE.", ["button: TWO", "button: ONE"], [1]),
        (
            "click-checkboxes",
            "Select b, a and click Submit.",
            ["checkbox: a", "checkbox: b", "button: Submit"],
            [1, 0, 2],
        ),
        (
            "click-checkboxes",
            "Select nothing and click Submit.",
            ["checkbox: a", "button: Submit"],
            [1],
        ),
    )
    def test_clicks(self, family, query, lines, wanted):
        elements = [element(*line.split(": ")) for line in lines]
        calls = oracles.ALL[family](query, elements)
        self.assertEqual(calls, [("click", number, "") for number in wanted])

    def test_texts(self):
        elements = [element("text", ""), element("button", "Submit")]
        calls = oracles.ALL["enter-text"]('Enter "Ada" into ...', elements)
        self.assertEqual(calls, [("type", 0, "Ada"), ("click", 1, "")])

    def test_what_an_agent_reads(self):
        seen = [
            Element("text", "Name", "Ada", False),
            Element("radio", "a", "on", True),
        ]
        self.assertEqual(
            world.shown("Do it.", seen),
            "The page asks: Do it.\n[0] text: Name = 'Ada'\n[1] radio: a (chosen)",
        )


class WithoutTest(parameterized.TestCase):
    def test_what_is_missing_is_named(self):
        page.html.cache_clear()
        with mock.patch.object(importlib.util, "find_spec", return_value=None):
            self.assertIn("no playwright", browser.missing())
            with self.assertRaisesRegex(config.InputError, "--no-deps miniwob"):
                environments.make("miniwob")


@unittest.skipIf(REASON, f"no browser with pages: {REASON}")
class PagesTest(parameterized.TestCase):
    def test_a_task_is_proven(self):
        taskset = environments.make("miniwob:enter-text")
        self.addCleanup(taskset.close)
        proof = asyncio.run(proofs.prove(taskset, taskset.task("train", 0, 0), 1))
        self.assertEqual((proof.failures, proof.num_episodes), ((), 4))

    @parameterized.parameters(*oracles.ALL)
    @pytest.mark.slow  # minutes
    def test_a_task_of_each_family_is_proven(self, family):
        taskset = environments.make(f"miniwob:{family}")
        self.addCleanup(taskset.close)
        proof = asyncio.run(proofs.prove(taskset, taskset.task("held_out", 0, 1), 2))
        self.assertEmpty(proof.failures)

    def test_a_seed_gives_one_page_and_wrong_calls_are_answered(self):
        taskset = environments.make("miniwob:click-checkboxes")
        self.addCleanup(taskset.close)
        task = taskset.task("train", 0, 0)
        turns = [
            tool_calls.turn("look"),
            tool_calls.turn("click", element=99),
            tool_calls.turn("type", element=0, text="x"),
        ]
        first, second, third = episodes.play(taskset, task, *turns)
        (again,) = episodes.play(taskset, task, turns[0])
        self.assertEqual(first.messages, again.messages)
        self.assertStartsWith(first.messages[0]["content"], "The page asks: Select ")
        self.assertIn("no element 99", second.messages[0]["content"])
        self.assertStartsWith(third.messages[0]["content"], "error: ")

    def test_unknown_pages_are_refused(self):
        with self.assertRaisesRegex(config.InputError, "no page 'vim'.*enter-text"):
            environments.make("miniwob:vim")


if __name__ == "__main__":
    environment.main()
