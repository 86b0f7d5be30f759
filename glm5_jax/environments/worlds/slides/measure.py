"""The facts of a page: what the browser laid out, and what of it can be seen."""

import dataclasses
import functools
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm5_jax.environments import browser
from glm5_jax.environments.worlds.slides import markup

WIDTH, HEIGHT = 1280, 720
Box = Sequence[float | int]  # left, top, right, bottom
SECONDS = 10.0  # for a page; the slowest of the labelled ones takes a tenth
# Checks compare all pairs of boxes, and look at the pixels of each.
MOST_BOXES = 1000  # of words and pictures; a slide full of small words has as many
MOST_AREA = 4  # slides, of all boxes together
# Only the glyphs: `color` would also take what is painted with currentColor.
# A sheet beside the page's own, of which no selector of the page can tell.
_HIDE = """() => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`* { transition: none !important; text-shadow: none !important;
      -webkit-text-fill-color: transparent !important;
      -webkit-text-stroke-color: transparent !important }
    svg text, svg text * { fill: transparent !important;
      stroke: transparent !important }`);
  document.adoptedStyleSheets = [sheet];
}"""
_UNHIDE = "() => { document.adoptedStyleSheets = [] }"


@dataclasses.dataclass(frozen=True)
class Facts:
    """A page as it was rendered.

    Attributes:
        problems: of the markup; then nothing was rendered.
        layout: what measure.js returns.
        seen: pixels of the page, [height, width, 3].
        bare: the same without the glyphs of its texts.
    """

    problems: tuple[str, ...]
    layout: Mapping[str, Any]
    seen: np.ndarray
    bare: np.ndarray


async def measure(
    renderer: browser.Browser, html: str, images: Mapping[str, bytes]
) -> Facts:
    """Renders a page and returns its facts.

    Args:
        renderer: the browser.
        html: of the page.
        images: files that it may show.

    Raises:
        browser.BrowserError: the browser ended, twice.
    """
    problems = markup.problems(html, images)
    blank = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    if problems:
        return Facts(problems, {}, blank, blank)
    used = {name: text for name, text in images.items() if name in html}
    files = {**used, "index.html": html.encode(errors="replace")}
    site = browser.Site(files, WIDTH, HEIGHT)
    try:
        layout, seen, bare = await renderer.run(site, _take, SECONDS)
    except browser.SlowPageError as error:
        return Facts((str(error),), {}, blank, blank)
    if problems := _excess(layout):
        return Facts(problems, {}, blank, blank)
    return Facts((), layout, _pixels(seen), _pixels(bare))


def _excess(layout: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns why a page is not judged; () if it is.

    What is forbidden may be seen by the browser alone, or it would take too long.
    """
    if problem := layout.get("problem"):
        return (problem,)
    if refused := layout["refused"]:
        return tuple(f"a style has {rule}, which is forbidden" for rule in refused)
    boxes = [box for word in layout["words"] for box in word["rects"]]
    boxes += [image["box"] for image in layout["images"]]
    if len(boxes) > MOST_BOXES:
        return (f"the page has more than {MOST_BOXES} boxes of words and pictures",)
    seen = (
        (min(right, WIDTH) - max(left, 0)) * (min(bottom, HEIGHT) - max(top, 0))
        for left, top, right, bottom in boxes
        if right > 0 and left < WIDTH and bottom > 0 and top < HEIGHT
    )
    if sum(seen) > MOST_AREA * WIDTH * HEIGHT:
        return (
            f"words and pictures have more than {MOST_AREA} times the slide's area",
        )
    return ()


async def _take(page: Any) -> tuple[Mapping[str, Any], bytes, bytes]:
    """Measures and photographs a loaded page."""
    layout = await page.evaluate(_script())
    if "problem" in layout:
        return layout, b"", b""
    seen = await page.screenshot()
    await page.evaluate(_HIDE)
    bare = await page.screenshot()
    await page.evaluate(_UNHIDE)  # the page is used again
    return layout, seen, bare


@functools.cache
def _script() -> str:
    return pathlib.Path(__file__).with_name("measure.js").read_text(encoding="utf-8")


def _pixels(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
