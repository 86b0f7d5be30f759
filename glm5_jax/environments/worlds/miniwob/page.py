"""A page of MiniWoB++: what an agent sees of it, and what it can do with it."""

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

from glm5_jax import config
from glm5_jax.environments import browser, tool_calls

_ACTION_SECONDS, _SECONDS = 3.0, 20.0  # of an action, and of anything
_WINDOW = 400  # pixels, wide and high
# Names what can be read or used, in the order of the document; a text once.
_LOOK = """() => {
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('#query, #reward-display, #sync-task-cover, #click-canvas')) continue;
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height || getComputedStyle(e).visibility == 'hidden')
      continue;
    const tag = e.tagName.toLowerCase();
    const used = ['button', 'input', 'textarea', 'select', 'a'].includes(tag)
      || e.classList.contains('alink');
    const own = [...e.childNodes].filter(n => n.nodeType == 3)
      .map(n => n.textContent).join(' ').trim();
    if (!used && (!own || e.closest('button, a, label'))) continue;
    const label = e.closest('label');
    const plain = used && tag == 'span' ? 'a' : tag;
    const kind = tag == 'input' ? (e.type || 'text') : plain;
    found.push({element: e, kind, value: e.value || '', checked: !!e.checked,
                text: (label || e).innerText.trim() || e.title || ''});
  }
  window.glm5Elements = found.map(f => f.element);
  return found.map(({element, ...rest}) => rest);
}"""
_DONE = "() => [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
# The same seed gives the same page. Time does not end it: models differ in speed.
_START = """seed => {
  Math.seedrandom(seed); core.EPISODE_MAX_TIME = 2**31 - 1; core.startEpisodeReal();
}"""


@dataclasses.dataclass(frozen=True)
class Element:
    """A part of a page; its place in the list is its number."""

    kind: str  # "button", "text", "checkbox", "a", ...
    text: str
    value: str
    checked: bool


async def opened(renderer: browser.Browser, family: str, seed: int) -> "Page":
    """Returns a family's page, which has made the task of a seed.

    Raises:
        browser.SlowPageError: it took too long.
        browser.BrowserError: the browser ended.
    """
    session = await renderer.open(site(), _SECONDS, f"miniwob/{family}.html")
    await session.run(lambda page: page.evaluate(_START, f"{seed}"), _SECONDS)
    return Page(session)


class Page:
    """A page of a family, started from a seed."""

    def __init__(self, session: browser.Session) -> None:
        """Takes an open page; `opened` makes it."""
        self._session = session

    async def close(self) -> None:
        """Closes the page."""
        await self._session.close()

    async def look(self) -> tuple[str, Sequence[Element]]:
        """Returns what the page asks, and its elements."""

        async def work(page: Any) -> tuple[str, list[dict[str, Any]]]:
            return await page.inner_text("#query"), await page.evaluate(_LOOK)

        query, found = await self._session.run(work, _SECONDS)
        return " ".join(query.split()), [Element(**one) for one in found]

    async def click(self, number: int) -> None:
        """Clicks into the middle of an element.

        Raises:
            tool_calls.CallError: there is no such element, or it is covered.
        """
        await self._act(number, "click")

    async def type(self, number: int, text: str) -> None:
        """Puts a text into a field in place of its own.

        Raises:
            tool_calls.CallError: there is no such element, or it takes no text.
        """
        await self._act(number, "fill", text)

    async def reward(self) -> float | None:
        """Returns the page's reward, -1 to 1; None: the task is not over."""
        is_over, reward = await self._session.run(
            lambda page: page.evaluate(_DONE), _SECONDS
        )
        return float(reward) if is_over else None

    async def _act(self, number: int, what: str, *words: str) -> None:
        from playwright import async_api

        async def work(page: Any) -> None:
            handle = await page.evaluate_handle(
                "number => (window.glm5Elements || [])[number]", number
            )
            element = handle.as_element()
            if element is None:
                raise tool_calls.CallError(f"there is no element {number}; look first.")
            try:
                await getattr(element, what)(*words, timeout=_ACTION_SECONDS * 1000)
            except async_api.Error as error:
                raise tool_calls.CallError(str(error).splitlines()[0]) from error

        await self._session.run(work, _SECONDS)


@functools.cache
def site() -> browser.Site:
    """Returns the files of all pages."""
    root = html()
    paths = [path for path in root.rglob("*") if path.is_file()]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    return browser.Site(files, width=_WINDOW, height=_WINDOW)


@functools.cache
def html() -> pathlib.Path:
    """Returns the folder of the pages.

    Raises:
        config.InputError: the package is not installed.
    """
    found = importlib.util.find_spec("miniwob")
    if found is None or found.origin is None:
        raise config.InputError(
            "The tasks 'miniwob' need the pages of a package: pip install --no-deps "
            "miniwob."
        )
    return pathlib.Path(found.origin).parent / "html"
