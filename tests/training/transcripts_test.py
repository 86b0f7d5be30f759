"""The page of episodes: what it says of each token, in a real Chromium."""

import math
import unittest

from absl.testing import parameterized

from glm5_jax.environments import protocol
from glm5_jax.rl import episode_files, gateway
from glm5_jax.training.reporting import transcripts
from tests import environment, runs
from tests.data import templates_test
from tests.rl import trajectories_test
from tests.serving import page_test
from tests.training import rl_runs

TOKENIZER = templates_test.TOKENIZER
CRITIC = {"critic": True, "critic_warmup_steps": 1, "group_size": 1}
VERSION = 5  # of the weights that learn
HOSTILE = "</script><b>"
RED = "rgb(207, 34, 46)"


def make_episode(reward, behind=0, logprob=-5.0, **changes):
    """An episode whose prompt is hostile, and whose answer has two tokens."""
    prompt, answer = TOKENIZER.encode(HOSTILE), TOKENIZER.encode("ok")
    sample = gateway.Sample(
        [*prompt, *answer],
        [False] * len(prompt) + [True] * 2,
        [0.0] * len(prompt) + [logprob, -0.0],
        [gateway.NOT_SAMPLED] * len(prompt) + [VERSION - behind] * 2,
    )
    return trajectories_test.episode(
        samples=[sample], reward=protocol.Reward(reward, {"right": reward}), **changes
    )


def make_step():
    good, bad = make_episode(1.0), make_episode(0.0, behind=2, logprob=-2.5)
    failed = trajectories_test.episode(
        samples=[], reward=None, label=protocol.Label.ENV_ERROR, reason="it broke"
    )
    return episode_files.Step(6, VERSION, [[good, bad, good]], [failed])


def make_critics_step():
    """A step whose tokens have advantages of their own: those of the answers."""
    good, bad = make_episode(1.0), make_episode(0.0, behind=2)
    size = len(good.samples[0].tokens) - 2
    told = {
        id(good.samples[0]): [0.0] * size + [0.25, 0.5],
        id(bad.samples[0]): [0.0] * size + [-1.0, math.nan],
    }
    return episode_files.Step(
        6, VERSION, [[good], [bad]], [make_episode(0.5)], advantages=told
    )


class ContentTest(parameterized.TestCase):
    def test_tokens_have_the_advantages_of_a_critic(self):
        config = rl_runs.make_config(CRITIC)
        found = transcripts.content(config, TOKENIZER, [make_critics_step()])
        good, bad, unused = found["steps"][0]["episodes"]
        values = good["samples"][0]["advantages"]
        self.assertEqual((values[-2:], set(values[:-2])), ([0.25, 0.5], {None}))
        self.assertEqual(bad["samples"][0]["advantages"][-2:], [-1.0, None])
        self.assertIsNone(unused["samples"][0]["advantages"])
        self.assertEqual([e["advantage"] for e in (good, bad, unused)], [None] * 3)

    def test_a_repeated_episode_is_shown_once_with_its_advantage(self):
        config = rl_runs.make_config({"advantage_std": "none"})
        found = transcripts.content(config, TOKENIZER, [make_step()])
        good, bad, failed = found["steps"][0]["episodes"]
        self.assertEqual((good["times"], bad["times"], failed["times"]), (2, 1, 0))
        self.assertEqual((good["advantage"], bad["advantage"]), (0.3333, -0.6667))
        self.assertIsNone(failed["advantage"])
        self.assertEqual(bad["samples"][0]["behind"][-2:], [2, 2])
        self.assertEqual(set(bad["samples"][0]["logprobs"][:-2]), {None})

    def test_every_id_has_a_text(self):
        size = TOKENIZER.vocab_size
        ids = [TOKENIZER.special_ids["<|user|>"], *TOKENIZER.encode("é"), size]
        sample = gateway.Sample(ids, [True] * 4, [-1.0] * 4, [0] * 4)
        episode = trajectories_test.episode(samples=[sample])
        step = episode_files.Step(1, 0, [[episode, episode]], [])
        found = transcripts.content(rl_runs.make_config(), TOKENIZER, [step])
        texts = [found["pieces"][token] for token in ids]
        self.assertEqual(texts, ["<|user|>", "\\xc3", "\\xa9", f"<{size}>"])


@unittest.skipIf(page_test.sync_api is None, "needs playwright")
@unittest.skipIf(page_test.CHROMIUM is None, "needs Chromium")
class PageTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        driver = cls.enterClassContext(page_test.sync_api.sync_playwright())
        cls.browser = driver.chromium.launch(
            executable_path=page_test.CHROMIUM, args=page_test.FLAGS
        )
        cls.addClassCleanup(cls.browser.close)

    def open(self, rl=None, step=None):
        config = rl_runs.make_config(rl or {"advantage_std": "none"})
        shown = [step or make_step()]
        text = transcripts.page(config, TOKENIZER, shown, "runs/<x>")
        path = self.root / "page.html"
        path.write_text(text, encoding="utf-8")
        page = self.browser.new_page()
        self.addCleanup(page.close)
        self.problems = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self.problems.append(said.text))
        page.on("request", lambda x: self.requested.append(x.url))
        self.requested = []
        page.goto(path.as_uri())
        return page

    def colours(self, page):
        """Returns the background of each sampled token that is shown."""
        return page.evaluate(
            "[...document.querySelectorAll('.sampled')]"
            ".map(e => getComputedStyle(e).backgroundColor)"
        )

    def test_tokens_have_the_colours_of_the_chosen_figure(self):
        page = self.open()
        self.assertEqual(page.title(), "runs/<x>")
        said = page.locator(".reward").all_inner_texts()
        wanted = ["reward 1 · 1 episodes", "reward 0 · 1 episodes"]
        self.assertEqual(said, [*wanted, "no reward · 1 episodes"])
        for summary in page.locator(".episode > summary").all():
            summary.click()
        self.assertEqual(page.locator("b").count(), 0)  # of the hostile prompt
        self.assertEqual(page.locator(".tokens").first.inner_text(), f"{HOSTILE}ok")
        self.assertIn("it broke", page.inner_text("main"))
        self.assertIn("2 times", page.locator(".episode > summary").first.inner_text())

        certain = "rgba(207, 34, 46, 0)"
        half = "rgba(207, 34, 46, 0.5)"
        self.assertEqual(self.colours(page), [RED, certain, half, certain])
        found = {}
        for name in ("version", "mask", "advantage"):
            page.click(f"#modes button:text-is('{name}')")
            pressed = page.locator("#modes button[aria-pressed=true]").all_inner_texts()
            self.assertEqual(pressed, [name])
            found[name] = self.colours(page)
        trained, *_, stale = found["version"]
        self.assertEqual(found["version"], [trained, trained, stale, stale])
        self.assertNotEqual(trained, stale)
        self.assertLen(set(found["mask"]), 1)
        blue, *_, red = found["advantage"]
        self.assertEqual(found["advantage"], [blue, blue, red, red])
        self.assertRegex(blue, r"rgba\(9, 105, 218, 0\.35\)")  # half of the largest
        self.assertRegex(red, r"rgba\(207, 34, 46, 0\.7\)")
        self.assertEmpty(self.problems)
        self.assertLen(self.requested, 1)  # itself

    def test_each_token_has_the_colour_that_a_critic_gave_it(self):
        page = self.open(CRITIC, make_critics_step())
        page.click("#modes button:text-is('advantage')")
        for summary in page.locator(".episode > summary").all():
            summary.click()
        page.locator(".tokens").nth(2).wait_for()
        blue, red = "rgba(9, 105, 218, {})", "rgba(207, 34, 46, {})"
        clear = "rgba(0, 0, 0, 0)"
        good, unused = [blue.format(x) for x in (0.176, 0.35)], [clear] * 2
        bad = [red.format(0.7), clear]
        self.assertEqual(self.colours(page), [*good, *unused, *bad])
        legend = page.locator("#legend span").all_inner_texts()
        self.assertEqual(legend, ["-1.00", "0.00", "1.00"])
        titles = page.locator(".sampled").all()
        told = [one.get_attribute("title").rpartition(", ")[2] for one in titles]
        wanted = ["advantage 0.25", "advantage 0.5", "of the trained version"]
        self.assertEqual(told[:3], wanted)
        self.assertEqual(told[4:], ["advantage -1", "2 versions behind"])
        self.assertEmpty(self.problems)

    def test_the_legend_names_what_there_is(self):
        page = self.open()
        page.click("#modes button:text-is('version')")
        legend = page.locator("#legend span").all_inner_texts()
        self.assertEqual(legend, ["trained", "2 behind"])
        title = page.locator(".sampled").first
        page.locator(".episode > summary").nth(1).click()
        self.assertRegex(
            title.get_attribute("title"),
            r"^id \d+, log-prob -2.5, 2 versions behind, advantage -0.6667$",
        )


if __name__ == "__main__":
    environment.main()
