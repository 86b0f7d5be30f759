"""The judge of slides: sound pages pass, and every hack lowers the reward."""

import asyncio
import io
import unittest
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from glm5_jax.environments import browser
from glm5_jax.environments.worlds.slides import (
    briefs,
    checks,
    flaws,
    labelled,
    pages,
    pixels,
)
from glm5_jax.environments.worlds.slides import measure as measure_lib

MISSING = browser.missing()
PAGE = briefs.Page(
    "figure", "Three facts", ("Trains run at night", "Costs fell"), "a.svg"
)
IMAGES = {
    "a.svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='480' height='360'>"
    b"<path d='M0 0L480 360M0 90L480 200' stroke='red' stroke-width='20'/></svg>"
}
# Written by hand, so that it shares nothing with the pages of pages.py.
SOUND = """<!DOCTYPE html>
<html><head><style>
body { margin: 0 }
.slide { position: relative; width: 1280px; height: 720px; background: #fff;
  font: 30px/1.4 'DejaVu Sans'; color: #222; overflow: hidden }
h1 { position: absolute; left: 60px; top: 50px; margin: 0; font-size: 60px }
p { position: absolute; left: 60px; margin: 0 }
#a { top: 220px } #b { top: 400px }
img { position: absolute; left: 700px; top: 250px; width: 480px; height: 360px }
</style></head><body><section class="slide"><h1>Three facts</h1>
<p id="a">Trains run at night</p><p id="b">Costs fell</p><img src="a.svg">
</section></body></html>"""
# What is added to the style of SOUND, and the gate that it fails.
HACKS = {
    "clipped_box": ("#a { height: 10px; overflow: hidden }", "uncut"),
    "clipped_width": (
        "#a { width: 90px; white-space: nowrap; overflow: clip }",
        "uncut",
    ),
    "max_height": ("#a { max-height: 0; overflow: hidden }", "uncut"),
    "contained": ("#a { height: 9px; contain: paint }", "uncut"),
    "ellipsis": (
        "#a { width: 99px; overflow: hidden; white-space: nowrap;"
        " text-overflow: ellipsis }",
        "uncut",
    ),
    "scaled": ("#a { transform: scale(.5) }", "unmoved"),
    "scaled_slide": (".slide { transform: scale(.5); zoom: 2 }", "unmoved"),
    "scaled_alone": ("#a { scale: .5 }", "unmoved"),
    "zoomed": ("#a { zoom: .5 }", "unmoved"),
    "turned": ("#a { rotate: 90deg }", "unmoved"),
    "zero_size": ("#a { font-size: 0 }", "shown"),
    "tiny": ("#a { font-size: 2px }", "shown"),
    "tiny_line": ("#a::first-line { font-size: 2px }", "shown"),
    "no_display": ("#a { display: none }", "shown"),
    "invisible": ("#a { visibility: hidden }", "shown"),
    "no_opacity": ("#a { opacity: 0 }", "shown"),
    "content_visibility": ("#a { content-visibility: hidden }", "shown"),
    "clip_path": ("#a { clip-path: circle(0) }", "unmasked"),
    "masked": ("#a { mask-image: linear-gradient(transparent, red) }", "unmasked"),
    "filtered": ("#a { filter: brightness(9) }", "unmasked"),
    "blended": ("#a { mix-blend-mode: lighten }", "unmasked"),
    "old_clip": ("#a { clip: rect(0 0 0 0) }", "unmasked"),
    "off_left": ("#a { left: -5000px }", "inside"),
    "off_below": ("#a { top: 800px }", "inside"),
    "half_off": ("#a { left: 1150px; white-space: nowrap }", "inside"),
    "indented": ("#a { text-indent: -5000px }", "spacing"),
    "huge_lines": ("#a { line-height: 6 }", "spacing"),
    "flat_lines": ("#a { line-height: 0.1 }", "spacing"),
    "wide_letters": ("#a { letter-spacing: 1em }", "spacing"),
    "one_place": ("#a { letter-spacing: -0.6em }", "spacing"),
    "white_on_white": ("#a { color: #fff }", "ink"),
    "nearly_white": ("#a { color: #fcfcfc }", "ink"),
    "white_line": ("#a::first-line { color: #fff }", "ink"),
    "on_itself": ("#a { background: currentColor }", "ink"),
    "transparent": ("#a { color: transparent }", "ink"),
    "unfilled": ("#a { -webkit-text-fill-color: transparent }", "ink"),
    # The judge itself may not change what a selector finds.
    "striped_when_measured": (
        "p, h1 { color: #fff } p[style], h1[style] { background:"
        " repeating-linear-gradient(90deg, #222 0 2px, #fff 2px 4px) }",
        "ink",
    ),
    "covered": (
        ".slide::after { content: ''; position: absolute; background: #fff;"
        " left: 0; top: 200px; width: 600px; height: 100px }",
        "ink",
    ),
    "half_covered": (
        ".slide::after { content: ''; position: absolute; background: #fff;"
        " left: 110px; top: 200px; width: 600px; height: 100px }",
        "ink",
    ),
    "under_the_ground": (
        "#a { z-index: -1 } .slide { z-index: 0 } "
        ".slide::before { content: ''; position: absolute; inset: 0;"
        " background: #fff; z-index: 0 } #a { z-index: -1 }",
        "ink",
    ),
    "later": ("#a { animation: none 2s }  #b { transition: color 2s }", "still"),
    "blank_font": (
        "@font-face { font-family: x; src: url(data:font/woff2;base64,d09GMg) }",
        "markup",
    ),
    "imported": ("@import 'http://example.org/a.css';", "markup"),
    "escaped": ("#a { background: \\75rl(http://example.org) }", "markup"),
    "four_to_three": (".slide { width: 960px }", "slide"),
    "too_high": (".slide { height: 1440px }", "slide"),
    "scrolls": ("body { height: 2000px }", "slide"),
}
# What takes the place of a part of SOUND.
EDITS = {
    "script": ("<h1>", "<script>document.body.style = ''</script><h1>", "markup"),
    "handler": ("<h1>", "<h1 onclick='x()'>", "markup"),
    "frame": ("<h1>", "<iframe src='a.svg'></iframe><h1>", "markup"),
    "away": ("<h1>", "<meta http-equiv=refresh content='0;url=a.svg'><h1>", "markup"),
    "template": (
        '<p id="b">Costs fell</p>',
        "<template>Costs fell</template>",
        "markup",
    ),
    "input": ('<p id="b">Costs fell</p>', "<input value='Costs fell'>", "markup"),
    "named": ("<img src", "<img name=createTreeWalker src", "markup"),
    "named_in_a_comment": (
        "<h1>",
        "<!--><img name=querySelectorAll src=a.svg><!-- --><h1>",
        "markup",
    ),
    # Comments end elsewhere for a parser of markup than for a browser.
    "comment": ("<h1>", "<!--><form><!-- --><h1>", "markup"),
    "in_a_comment": ("Costs fell", "<!-- Costs fell -->", "content"),
    "in_an_attribute": ("Costs fell", "<b title='Costs fell'></b>", "content"),
    "generated": ('id="b">Costs fell', "id=b class=g>", "content"),
    "in_another_order": (
        '<p id="a">Trains run at night</p><p id="b">Costs fell</p>',
        '<p id="b">Costs fell</p><p id="a">Trains run at night</p>',
        "content",
    ),
    "beside_the_slide": ("</body>", "<p>more</p></body>", "document"),
    "no_slide": ('class="slide"', 'class="page"', "document"),
    "quirks": ("<!DOCTYPE html>", "", "markup"),
}


@unittest.skipIf(MISSING, MISSING)
class JudgeTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.close)

    def judge(self, html, page=PAGE, images=IMAGES):
        return asyncio.run(checks.judge(self.browser, html, page, images))

    def test_a_sound_page_passes_all(self):
        self.assertEqual(self.judge(SOUND), checks.Verdict(1.0, ()))

    @parameterized.named_parameters(*[(k, *v) for k, v in HACKS.items()])
    def test_a_hack_of_style_earns_nothing(self, rule, gate):
        found = self.judge(SOUND.replace("</style>", f"{rule}\n</style>"))
        self.assertEqual(found.score, 0.0)
        self.assertIn(gate, found.failed)

    @parameterized.named_parameters(*[(k, *v) for k, v in EDITS.items()])
    def test_a_hack_of_markup_earns_nothing(self, old, new, gate):
        self.assertIn(old, SOUND)
        found = self.judge(SOUND.replace(old, new))
        self.assertEqual(found.score, 0.0)
        self.assertIn(gate, found.failed)

    @parameterized.parameters(
        ("@page { size: 1280px 720px; margin: 0 }", ()),
        ("p { @media print { & { color: red } } }", ()),
        ("@container (min-width: 1px) { p { color: red } }", ("@container",)),
        ("@media all { p { @starting-style { top: 0 } } }", ("@starting-style",)),
    )
    def test_a_rule_that_is_forbidden_is_told(self, rule, refused):
        found = self.judge(SOUND.replace("</style>", f"{rule}\n</style>"))
        told = tuple(f"a style has {name}, which is forbidden" for name in refused)
        self.assertEqual(found.problems, told)
        self.assertEqual(found.score, 0.0 if refused else 1.0)

    def test_faults_cost_their_weight(self):
        total = sum(rule.weight for rule in checks.RULES.values())
        found = self.judge(SOUND.replace("#222", "#a5a5a5"))
        self.assertEqual(found.failed, ("contrast",))
        self.assertAlmostEqual(found.score, 1 - 3 / total)
        found = self.judge(SOUND.replace("#b { top: 400px }", "#b { top: 225px }"))
        self.assertEqual(found.failed, ("overlaps",))

    def test_labelled_pages_are_told_apart(self):
        """One of each flaw, and a sound page of each kind."""
        made = [*labelled.make(1, first=7)]

        async def judge_all():
            return await asyncio.gather(
                *(
                    checks.judge(self.browser, one.html, one.page, one.images)
                    for one in made
                )
            )

        for one, found in zip(made, asyncio.run(judge_all()), strict=True):
            with self.subTest(one.flaw or one.page.kind):
                if not one.flaw:
                    self.assertEqual(found.failed, ())
                    continue
                flaw = flaws.ALL[one.flaw]
                self.assertIn(flaw.check, found.failed)
                self.assertEqual(found.score == 0.0, flaw.is_hack)

    def test_verdicts_of_a_page_agree(self):
        html = pages.render(briefs.make(3, 3).pages[1], pages.style(3))
        brief = briefs.make(3, 3)
        again = [self.judge(html, brief.pages[1], brief.images) for _ in range(3)]
        self.assertLen(set(again), 1)

    def test_a_page_that_takes_too_long_earns_nothing(self):
        long = "x" * 50_000
        found = self.judge(SOUND.replace("Costs fell", long))
        self.assertEqual((found.score, found.failed), (0.0, ("markup",)))
        self.assertIn("longer than 40000", found.problems[0])

    def test_a_word_in_a_thousand_pieces_earns_nothing(self):
        """Every letter has a box of its own, and each pair of boxes is compared."""
        word = "<i style='display: block; width: 1px; word-break: break-all'>"
        found = self.judge(SOUND.replace("Costs fell", f"{word}{'x' * 1500}</i>"))
        self.assertEqual((found.score, found.failed), (0.0, ("markup",)))
        self.assertIn("more than 1000 boxes", found.problems[0])


class BoundsTest(parameterized.TestCase):
    """What a browser says of a page, without one."""

    @parameterized.named_parameters(
        ("many", 1001, (0, 0, 9, 9), "more than 1000 boxes"),
        ("pieces", 1000, (0, 0, 9, 9), ""),
        ("large", 5, (-1e6, -1e6, 1e6, 1e6), "more than 4 times the slide"),
        ("outside", 5, (2000, 0, 9000, 9000), ""),
        ("whole", 4, (-1e6, -1e6, 1e6, 1e6), ""),
    )
    def test_what_would_take_long_is_a_problem(self, count, box, problem):
        picture = io.BytesIO()
        Image.new("RGB", (1280, 720)).save(picture, "PNG")
        words = [{"rects": [box] * (count - 1)}]
        layout = {"refused": [], "words": words, "images": [{"box": box}]}
        found = layout, picture.getvalue(), picture.getvalue()
        renderer = mock.Mock(run=mock.AsyncMock(return_value=found))
        facts = asyncio.run(measure_lib.measure(renderer, SOUND, IMAGES))
        self.assertIn(problem, "".join(facts.problems))
        self.assertEqual(bool(facts.problems), bool(problem))
        self.assertEqual(bool(facts.layout), not problem)


class RulesTest(absltest.TestCase):
    def test_every_rule_has_a_flaw(self):
        self.assertEqual(set(checks.RULES), {f.check for f in flaws.ALL.values()})

    def test_hacks_fail_gates(self):
        for name, flaw in flaws.ALL.items():
            self.assertEqual(flaw.is_hack, checks.RULES[flaw.check].is_gate, name)


class PixelsTest(absltest.TestCase):
    def facts(self, seen, bare):
        return measure_lib.Facts((), {}, seen, bare)

    def test_contrast_is_wcags(self):
        """Black on white has 21, #767676 on white the well-known 4.54."""
        bare = np.full((20, 20, 3), 255, np.uint8)
        for grey, wanted in ((0, 21.0), (0x76, 4.54), (255, 1.0)):
            seen = bare.copy()
            seen[5:15, 5:9] = grey
            found = pixels.contrast(self.facts(seen, bare), (0, 0, 20, 20))
            self.assertAlmostEqual(found, wanted, places=2)

    def test_fill_counts_tiles_and_the_largest_empty_box(self):
        page = np.full((720, 1280, 3), 255, np.uint8)
        self.assertEqual(pixels.fill(page), (0.0, 1.0))
        page[:, 640:] = 0  # a plain panel is as empty as the ground
        self.assertEqual(pixels.fill(page), (0.0, 1.0))
        page[100, 660] = 255
        share, empty = pixels.fill(page)
        self.assertAlmostEqual(share, 1 / 144)
        # The tile at row 1, column 8: seven rows of all columns are left below it.
        self.assertAlmostEqual(empty, 7 * 16 / 144)


if __name__ == "__main__":
    absltest.main()
