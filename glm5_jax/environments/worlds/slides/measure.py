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
# Only the glyphs: `color` would also take what is painted with currentColor.
_HIDE = """() => {
  for (const e of document.querySelectorAll('*')) {
    e.style.setProperty('transition', 'none', 'important');
    e.style.setProperty('-webkit-text-fill-color', 'transparent', 'important');
    e.style.setProperty('-webkit-text-stroke-color', 'transparent', 'important');
    e.style.setProperty('text-shadow', 'none', 'important');
    if (e instanceof SVGElement && e.closest('text')) {
      e.style.setProperty('fill', 'transparent', 'important');
      e.style.setProperty('stroke', 'transparent', 'important');
    }
  }
}"""


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
    return Facts((), layout, _pixels(seen), _pixels(bare))


async def _take(page: Any) -> tuple[Mapping[str, Any], bytes, bytes]:
    """Measures and photographs a loaded page."""
    layout = await page.evaluate(_script())
    seen = await page.screenshot()
    await page.evaluate(_HIDE)
    return layout, seen, await page.screenshot()


@functools.cache
def _script() -> str:
    return pathlib.Path(__file__).with_name("measure.js").read_text(encoding="utf-8")


def _pixels(png: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
