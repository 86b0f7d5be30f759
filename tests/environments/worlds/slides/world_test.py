"""Episodes of the slides world, and the choice of what is trained on."""

import asyncio
import json
import pathlib
import sys
import unittest

from absl.testing import absltest, parameterized

from glm5_jax import config, environments, messages
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.rows import sft
from glm5_jax.environments import browser, proofs, tool_calls
from glm5_jax.environments.worlds.slides import checks, selection, world
from tests.environments import episodes

sys.path.insert(0, str(pathlib.Path(__file__).parents[4] / "benchmarks"))

import slides_decks

MISSING = browser.missing()
SUBMIT = tool_calls.turn("submit")


def write(page, html):
    return tool_calls.turn("write", page=page, html=html)


@unittest.skipIf(MISSING, MISSING)
class WorldTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.world = environments.make("slides:2")
        cls.addClassCleanup(cls.world.close)
        cls.task = cls.world.task("train", 0, 0)

    def play(self, *turns):
        return episodes.play(self.world, self.task, *turns)

    def test_a_task_is_proven(self):
        task = self.world.task("held_out", 3, 0)
        proof = asyncio.run(proofs.prove(self.world, task, num_repeats=1))
        self.assertEqual(proof.failures, ())
        self.assertEqual(proof.num_episodes, 1 + 4 + 1)

    def test_splits_share_no_task_and_repeat(self):
        train, held_out = (
            {self.world.task(split, 0, i).id for i in range(50)}
            for split in ("train", "held_out")
        )
        self.assertLen(train, 50)
        self.assertEmpty(train & held_out)
        self.assertEqual(environments.make("slides:2").task("train", 0, 0), self.task)

    def test_the_reward_is_the_mean_of_the_pages(self):
        good, _, submit = self.world.attempts(self.task).right
        *_, last = self.play(good, submit)
        self.assertEqual(last.reward.total, 0.5)
        parts = {"sound_pages": 0.5, "page_1": 1.0, "page_2": 0.0}
        self.assertEqual(last.reward.parts, parts)
        self.assertEqual(last.info["version"], checks.version())
        self.assertRegex(checks.version(), r"^slides-\d+\+fonts-[0-9a-f]{12}$")
        self.assertEqual(last.info["failed"][1], [])

    def test_look_tells_the_layout(self):
        html = "<!doctype html><body style='margin:0'><h1 style='margin:0'>Hi</h1>"
        first, second, _ = self.play(
            write(1, html), tool_calls.turn("look", page=1), SUBMIT
        )
        self.assertEqual(first.messages[0]["content"], "wrote page 1")
        said = second.messages[0]["content"]
        self.assertRegex(said, r"window: 1280 by 720\n<h1> x 0 to \d+, y 0 to \d+: Hi$")

    @parameterized.parameters(
        (("look", {"page": 1}), "page 1 is not written yet"),
        (("look", {"page": 3}), "there are pages 1 to 2"),
        (("write", {"page": 1, "html": "x" * 40_001}), "at most 40000 characters"),
        (("write", {"page": "1", "html": ""}), "page must be of type integer"),
    )
    def test_a_wrong_call_is_answered(self, call, message):
        name, arguments = call
        (result,) = self.play(tool_calls.turn(name, **arguments))
        self.assertIn(message, result.messages[0]["content"])

    def test_turns_are_bounded(self):
        *_, before, last = self.play(*[write(1, "")] * 12)
        self.assertFalse(before.truncated)
        self.assertEqual((last.truncated, last.terminated), (True, False))

    @parameterized.parameters("slides:0", "slides:7", "slides:x", "slides:")
    def test_wrong_names_are_refused(self, name):
        with self.assertRaisesRegex(config.InputError, "1 to 6 pages"):
            environments.make(name)


class SelectionTest(parameterized.TestCase):
    def deck(self, *turns, task="a", **scores):
        user = {"role": "user", "content": "brief"}
        scores = {int(name[1:]): score for name, score in scores.items()}
        return selection.Deck(task, [user, *turns, SUBMIT], scores)

    def test_the_best_whole_deck_of_a_brief_is_kept(self):
        one = self.deck(write(1, "one"), p1=0.9, p2=0.9)
        long = self.deck(write(1, "x"), write(1, "y"), p1=1.0, p2=0.8)
        best = self.deck(write(1, "best"), p1=1.0, p2=1.0)
        uneven = self.deck(p1=1.0, p2=0.2, task="b")
        other = self.deck(p1=0.8, p2=0.8, task="c")
        kept = selection.keep_best([one, long, best, uneven, other], least=0.5)
        self.assertEqual(kept, [best, other])
        self.assertEqual(selection.keep_best([long, one], least=0.5), [one])

    def test_pages_that_the_world_refused_count_for_nothing(self):
        late = {"tool_calls": [*SUBMIT["tool_calls"], *write(1, "z")["tool_calls"]]}
        ninth = {"tool_calls": write(1, "i")["tool_calls"] * 9}
        ninth["tool_calls"][8] = write(1, "x")["tool_calls"][0]
        long, beyond = write(1, "X" * 40_001), write(3, "c")
        deck = self.deck(write(2, "b"), ninth, long, beyond, late, p1=0.9, p2=0.9)
        self.assertEqual(selection.best_pages([deck], 0.5), {1: "i", 2: "b"})
        shown = selection.masked(deck, 0.5)
        self.assertFalse([m for m in shown[:2] if m.get("is_masked")])

    def test_the_best_pages_of_several_decks_are_found(self):
        decks = [
            self.deck(write(1, "draft"), write(1, "a"), write(2, "b"), p1=0.9, p2=0.3),
            self.deck(write(1, "c"), write(2, "d"), p1=0.7, p2=0.6),
            self.deck(write(3, "e"), p1=0.0, p2=0.0, p3=0.2),
        ]
        found = selection.best_pages(decks, least=0.5)
        self.assertEqual(found, {1: "a", 2: "d"})

    def test_turns_with_flawed_pages_are_masked(self):
        wrong = tool_calls.turn("write", page=1)
        both = write(1, "x")
        both = both | {
            "tool_calls": [*both["tool_calls"], *write(2, "y")["tool_calls"]]
        }
        deck = self.deck(
            both,
            wrong,
            tool_calls.turn("look", page=1),
            write(1, "good"),
            write(2, "bad"),
            write(3, "fine"),
            p1=1.0,
            p2=0.4,
            p3=0.9,
        )
        found = selection.masked(deck, least=0.8)
        masked = [i for i, message in enumerate(found) if message.get("is_masked")]
        # The draft of page 1, and page 2; neither the looks nor the good pages.
        self.assertEqual(masked, [1, 5])
        self.assertNotIn("is_masked", deck.history[1])
        messages.check(found, world.SCHEMAS)

    def test_each_brief_has_its_best_conversation(self):
        decks = [
            self.deck(write(1, "a"), write(2, "b"), p1=0.9, p2=0.9, task="whole"),
            self.deck(write(1, "c"), write(2, "d"), p1=1.0, p2=0.2, task="joined"),
            self.deck(write(1, "e"), write(2, "f"), p1=0.3, p2=0.8, task="joined"),
            self.deck(write(1, "g"), write(2, "h"), p1=0.9, p2=0.1, task="masked"),
            self.deck(write(1, "i"), write(2, "j"), p1=0.8, p2=0.0, task="masked"),
            self.deck(write(1, "k"), p1=0.1, p2=0.1, task="dropped"),
        ]
        found = selection.choose(decks, least=0.5)
        self.assertEqual(
            {task: how for task, (how, _) in found.items()},
            {task: task for task in ("whole", "joined", "masked")},
        )
        told = {
            task: [
                (call["function"]["arguments"]["html"], turn.get("is_masked", False))
                for turn in shown
                for call in turn.get("tool_calls", ())
                if call["function"]["name"] == "write"
            ]
            for task, (_, shown) in found.items()
        }
        wanted = {
            "whole": [("a", False), ("b", False)],
            "joined": [("c", False), ("f", False)],
            "masked": [("g", False), ("h", True)],
        }
        self.assertEqual(told, wanted)
        for _, shown in found.values():
            messages.check(shown, world.SCHEMAS)
            self.assertEqual(shown[0], {"role": "user", "content": "brief"})

    def test_sft_gives_a_masked_turn_no_loss(self):
        decks = [
            self.deck(
                write(1, f"GOOD{i}"), write(2, "FLAWED"), task=str(i), p1=1.0, p2=0
            )
            for i in range(24)  # some of which are held out
        ]
        chosen = selection.choose(decks, least=0.5).values()
        folder = self.create_tempdir().full_path
        lines = [{"messages": x, "tools": [*world.SCHEMAS]} for _, x in chosen]
        path = pathlib.Path(folder) / "decks.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        data = config.DataConfig(
            source=str(path),
            tokenizer="byte_chat",
            sequence_length=3000,
            batch_size=1,
            cache_dir=folder,
            held_out_percent=20,
            enable_thinking=False,
        )
        batch = sft.make_pipeline(data, 0).train_batch(0)
        targets, is_trained = batch["targets"][0], batch["loss_mask"][0] > 0
        spell = tokenizer_lib.named("byte_chat").spell
        self.assertIn("FLAWED", spell([*map(int, targets)]))
        trained = spell([*map(int, targets[is_trained])])
        self.assertIn("GOOD", trained)
        self.assertNotIn("FLAWED", trained)


@unittest.skipIf(MISSING, MISSING)
class DecksTest(absltest.TestCase):
    def test_decks_are_played_and_written(self):
        """Two decks of one page, the second with a flaw."""
        taskset = environments.make("slides:1")
        self.addCleanup(taskset.close)
        out = pathlib.Path(self.create_tempdir().full_path) / "decks.jsonl"
        sound, flawed = (slides_decks.scripted(taskset, rate) for rate in (0.0, 1.0))

        def author(task, number):
            return (sound, flawed)[number](task, number)

        work = slides_decks.select(taskset, author, 1, 2, 0.99, out)
        figures = asyncio.run(work)
        self.assertEqual(figures["decks_with_good_pages_alone"], 1)
        self.assertEqual((figures["briefs_whole"], figures["turns_masked"]), (1, 0))
        (line,) = map(json.loads, out.read_text().splitlines())
        task = taskset.task("train", 0, 0)
        turns = [m for m in line["messages"] if m["role"] == "assistant"]
        self.assertEqual(turns, [*taskset.attempts(task).right])


if __name__ == "__main__":
    absltest.main()
