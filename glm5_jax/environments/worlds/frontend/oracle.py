"""Decides checklist items exactly: plays their steps in a browser."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from glm5_jax.environments import browser
from glm5_jax.environments.worlds.frontend import draft
from glm5_jax.environments.worlds.frontend.projects import frameworks

# Of an item, and of opening a page. A page that takes longer fails, so it is far more
# than a sound page takes on a machine that does much else.
_SECONDS = 120.0
_WAIT = 10_000  # milliseconds for an element to be there
_WAIT_AGAIN = 500  # for one that was waited for in vain
_PATIENCE = 1.0  # seconds in which a framework shows what follows from a step
_POLL_SECONDS = 0.05
Files = Mapping[str, bytes]


class StepError(Exception):
    """Raised when a step cannot be done on a page, with the reason."""


async def act(page: Any, step: draft.Step, wait: float = _WAIT) -> None:
    """Clicks, types, presses a key or chooses.

    Args:
        page: of playwright.
        step: what to do.
        wait: milliseconds for the element to be there.

    Raises:
        StepError: there is no such element, or it cannot be used.
    """
    from playwright import async_api

    action, selector, *rest = step
    found = page.locator(selector).first
    try:
        if action == "click":
            await found.click(timeout=wait)
        elif action == "type":
            await found.fill(rest[0], timeout=wait)
        elif action == "choose":
            await found.select_option(rest[0], timeout=wait)
        else:
            await found.press(rest[0], timeout=wait)
    except async_api.Error as error:
        if page.is_closed():
            raise
        raise StepError(str(error).splitlines()[0]) from error


async def look(page: Any, selector: str) -> dict[str, Any]:
    """Returns count, visibility, text and value of the elements of a selector.

    Raises:
        StepError: the selector is malformed.
    """
    from playwright import async_api

    found = page.locator(selector)
    try:
        count = await found.count()
        if not count:
            return {"count": 0, "shown": False, "text": "", "value": ""}
        first = found.first
        is_shown = await first.is_visible()
        text = await first.inner_text(timeout=_WAIT) if is_shown else ""
        value = await first.evaluate("e => 'value' in e ? String(e.value) : ''")
    except async_api.Error as error:
        if page.is_closed():
            raise
        raise StepError(str(error).splitlines()[0]) from error
    words = " ".join(text.split())
    return {"count": count, "shown": is_shown, "text": words, "value": value}


def holds(step: draft.Step, seen: Mapping[str, Any]) -> bool:
    """Returns whether an expectation holds of what `look` saw."""
    action, _, *rest = step
    if action == "reads":
        return seen["shown"] and seen["text"] == rest[0]
    if action == "count":
        return seen["count"] == int(rest[0])
    if action == "value":
        return seen["count"] > 0 and seen["value"] == rest[0]
    return seen["shown"] == (action == "shown")


def is_expectation(step: draft.Step) -> bool:
    """Returns whether a step expects something and does nothing."""
    return step[0] in ("reads", "count", "value", "shown", "hidden")


async def decide(
    renderer: browser.Browser,
    files: Files,
    items: Sequence[draft.Item],
    framework: str = "",
    seconds_to_fail: float = math.inf,
) -> tuple[bool, dict[str, bool]]:
    """Returns whether a submission builds, and of each item whether it passes.

    It builds if index.html opens without an error of its scripts and shows something;
    one that does not passes no item.

    Args:
        renderer: the browser.
        files: the submission; what `npm run build` made of a project.
        items: the checklist.
        framework: that has to mount the page; "": none.
        seconds_to_fail: after an item has failed, for the others; then they fail, too.
    """
    used = frameworks.ALL.get(framework)
    nothing = {item.name: False for item in items}
    if "index.html" not in files:
        return False, nothing
    room = _Room(renderer, files)
    try:
        if not await room.try_out(_open(used)) or room.has_errors:
            return False, nothing
        return True, await _passed(room, items, used, seconds_to_fail)
    finally:
        await room.close()


async def _passed(
    room: "_Room",
    items: Sequence[draft.Item],
    used: frameworks.Framework | None,
    seconds_to_fail: float,
) -> dict[str, bool]:
    """Returns of each item whether it passes."""
    loop = asyncio.get_running_loop()
    passed: dict[str, bool] = {}
    missing: set[str] = set()  # selectors that were waited for in vain
    deadline = math.inf
    for item in items:
        is_late = loop.time() > deadline
        play = _play(item, used, missing)
        passed[item.name] = not is_late and await room.try_out(play)
        if not passed[item.name]:
            deadline = min(deadline, loop.time() + seconds_to_fail)
    return passed


class _Room:
    """A page that is opened anew for every item, with nothing that one before left."""

    def __init__(self, renderer: browser.Browser, files: Files) -> None:
        self._renderer, self._site = renderer, browser.Site(files)
        self._session: browser.Session | None = None
        self.has_errors = False  # of scripts, in the last one

    async def try_out(self, work: Callable[[Any], Awaitable[bool]]) -> bool:
        """Returns what work returns; False if the page hinders it."""
        from playwright import async_api

        for is_last in (False, True):
            try:
                await self.close()
                opened = await self._renderer.open(self._site, _SECONDS)
                self._session = opened
                found = await opened.run(work, _SECONDS)
                self.has_errors = bool(opened.errors)
                return found
            except StepError:
                return False
            except browser.SlowPageError:
                await self.close()
                return False
            except async_api.Error:  # the browser lives: it is the page's fault
                return False
            except browser.BrowserError:  # through another page's fault
                await self.close()
                if is_last:
                    raise
        raise AssertionError("one of two turns returns or raises")

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _open(used: frameworks.Framework | None) -> Callable[[Any], Awaitable[bool]]:
    """Makes the work that decides whether a page shows something."""

    async def is_shown(page: Any) -> bool:
        await _wait_for(page, used)
        return await page.evaluate("document.body.getClientRects().length > 0")

    return is_shown


def _play(
    item: draft.Item, used: frameworks.Framework | None, missing: set[str]
) -> Callable[[Any], Awaitable[bool]]:
    """Makes the work that decides an item, and adds to the missing elements."""

    async def play(page: Any) -> bool:
        await _wait_for(page, used)
        for step in item.steps:
            if not is_expectation(step):
                wait = _WAIT_AGAIN if step[1] in missing else _WAIT
                try:
                    await act(page, step, wait)
                except StepError:
                    missing.add(step[1])
                    raise
            elif not await _comes(page, step, _PATIENCE if used else 0.0):
                return False
        return True

    return play


async def _wait_for(page: Any, used: frameworks.Framework | None) -> None:
    """Waits until a framework has mounted the page.

    Raises:
        StepError: it does not.
    """
    from playwright import async_api

    if used is None:
        return
    mounted = f"(e => e !== null && ({used.is_mounted})(e) && e.childElementCount > 0)"
    try:
        await page.wait_for_function(
            f"{mounted}(document.querySelector({used.root!r}))", timeout=_WAIT
        )
    except async_api.Error as error:
        if page.is_closed():
            raise
        raise StepError(f"{used.title} mounts nothing at {used.root}") from error


async def _comes(page: Any, step: draft.Step, seconds: float) -> bool:
    """Returns whether an expectation holds, now or within some time."""
    loop = asyncio.get_running_loop()
    deadline, is_over = loop.time() + seconds, not seconds
    while not holds(step, await look(page, step[1])):
        if is_over:
            return False
        await asyncio.sleep(_POLL_SECONDS)
        is_over = loop.time() >= deadline  # asked before the last look, not after it
    return True
