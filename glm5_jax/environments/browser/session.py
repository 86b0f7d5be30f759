"""Pages of one Chromium, which lives in a thread with an event loop of its own.

So callers of any thread and loop share it. Pages are played with by coroutines that
take a page of playwright; they run in the browser's loop. A page that takes too long
may hang its process: the browser is then started anew, and work of others that this
interrupts is done once more. A page that takes too much memory crashes (memory.py).
"""

import asyncio
import concurrent.futures
import contextlib
import shutil
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from glm5_jax import config
from glm5_jax.environments.browser import chromium, memory
from glm5_jax.environments.browser import site as site_lib

_T = TypeVar("_T")
Work = Callable[[Any], Awaitable[_T]]  # takes a page of playwright
_NUM_PAGES = 4  # rendered at a time
_PAGES_OF_A_BROWSER = 5_000  # then it is started anew
_SECONDS_TO_START = 60.0
_SECONDS_TO_CLOSE = 10.0
_MOST_ERRORS, _MOST_CHARACTERS = 16, 500  # of a page's scripts that are kept


class BrowserError(Exception):
    """Raised when Chromium does not start, or ends twice during the same work."""


class SlowPageError(Exception):
    """Raised when a page took too long or crashed, which is the page's fault."""


class Browser:
    """A Chromium that starts when it is first needed."""

    def __init__(self) -> None:
        """Makes a browser that is not started yet.

        Raises:
            config.InputError: Chromium or playwright is not installed.
        """
        if reason := chromium.missing():
            raise config.InputError(f"Pages cannot be rendered: {reason}")
        self._life = _Life()
        weakref.finalize(self, self._life.end)

    async def run(self, site: site_lib.Site, work: Work[_T], seconds: float) -> _T:
        """Renders index.html without JavaScript, and returns what work returns.

        Args:
            site: the files.
            work: what to do with the page once it is loaded.
            seconds: for loading and work.

        Raises:
            SlowPageError: they took longer, or the page crashed.
            BrowserError: the browser ended, twice.
        """
        return await self._life.call(lambda: self._life.run(site, work, seconds))

    async def open(
        self, site: site_lib.Site, seconds: float = 20.0, path: str = ""
    ) -> "Session":
        """Opens a file with JavaScript, in a page that stays until it is closed.

        Args:
            site: the files.
            seconds: for loading.
            path: of the file; "" is index.html.

        Raises:
            SlowPageError: loading took longer, or the page crashed.
            BrowserError: the browser ended.
        """
        life = self._life
        found = await life.call(lambda: life.open(site, seconds, path))
        return Session(life, *found)

    def close(self) -> None:
        """Ends Chromium; the next call starts it again."""
        self._life.end()


class Session:
    """A page with JavaScript, apart from all others."""

    def __init__(self, life: "_Life", page: Any, errors: list[str]) -> None:
        """Takes an opened page; `Browser.open` makes sessions."""
        self._life, self._page = life, page
        self.errors = errors  # what the page's scripts raised

    async def run(self, work: Work[_T], seconds: float) -> _T:
        """Returns what work returns.

        Raises:
            SlowPageError: it took longer, or the page crashed; the session is over.
            BrowserError: the browser ended, for example for the sake of another page.
        """
        life, page = self._life, self._page
        return await life.call(lambda: life.work(page, work, seconds))

    async def close(self) -> None:
        """Closes the page."""
        life, page = self._life, self._page
        await life.call(lambda: life.discard(page.context))


class _Life:
    """The thread, Chromium in it, and pages to be used again."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._driver: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._chromium: Any = None
        self._starting = asyncio.Lock()
        self._gate = asyncio.Semaphore(_NUM_PAGES)
        self._idle: list[tuple[Any, dict[str, Any]]] = []
        self._num_pages = 0

    async def call(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Runs a coroutine in the browser's loop."""

        async def run() -> _T:
            return await work()

        future = asyncio.run_coroutine_threadsafe(run(), self._started_loop())
        return await asyncio.wrap_future(future)

    async def run(self, site: site_lib.Site, work: Work[_T], seconds: float) -> _T:
        from playwright import async_api

        async with self._gate:
            for is_last in (False, True):
                try:
                    return await self._render(site, work, seconds)
                except async_api.Error as error:
                    if is_last:
                        raise _told(error) from error
                    if not await self._is_alive():
                        await self._kill()
        raise AssertionError("one of two turns returns or raises")

    async def _render(self, site: site_lib.Site, work: Work[_T], seconds: float) -> _T:
        html = site.files["index.html"].decode(errors="replace")
        page, shown = await self._idle_page(site)

        async def load() -> _T:
            await page.set_content(html, wait_until="load", timeout=seconds * 1000)
            return await work(page)

        shown["site"] = site
        found = await self.bounded(load(), seconds)
        self._idle.append((page, shown))
        self._num_pages += 1
        if self._num_pages >= _PAGES_OF_A_BROWSER and len(self._idle) == _NUM_PAGES:
            await self._kill()
        return found

    async def _idle_page(self, site: site_lib.Site) -> tuple[Any, dict[str, Any]]:
        """Returns a page of the site's size, at an address for its other files.

        A process remembers the pictures of an address. So a page is used again as it
        is only for the same files; for others it moves, which takes longer.
        """
        size = {"width": site.width, "height": site.height}
        address = site.address
        while self._idle:
            same = [i for i, x in enumerate(self._idle) if x[1]["address"] == address]
            page, shown = self._idle.pop(same[-1] if same else -1)
            if page.is_closed():
                continue
            if page.viewport_size != size:
                await page.set_viewport_size(size)
            if not same:
                await _move(page, shown, site)
            return page, shown
        browser = await self._started()
        context = await browser.new_context(viewport=size, java_script_enabled=False)
        shown: dict[str, Any] = {}

        async def serve(route: Any) -> None:
            if not route.request.is_navigation_request():
                await _serve(route, shown["site"], shown["address"])
            elif route.request.url == shown["to"]:
                await route.fulfill(body="", content_type="text/html")
            else:
                await route.fulfill(status=204)  # the page stays where it is

        await context.route("**/*", serve)
        page = await context.new_page()
        await _move(page, shown, site)
        return page, shown

    async def open(
        self, site: site_lib.Site, seconds: float, path: str
    ) -> tuple[Any, list[str]]:
        from playwright import async_api

        for is_last in (False, True):
            try:
                return await self._open(site, seconds, path)
            except async_api.Error as error:
                if is_last:
                    raise _told(error) from error
        raise AssertionError("one of two turns returns or raises")

    async def _open(
        self, site: site_lib.Site, seconds: float, path: str
    ) -> tuple[Any, list[str]]:
        browser = await self._started()
        size = {"width": site.width, "height": site.height}
        context = await browser.new_context(viewport=size, accept_downloads=False)
        try:
            await context.route(
                "**/*", lambda route: _serve(route, site, site_lib.ORIGIN)
            )
            page = await context.new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error: _keep(errors, error))
            await self.bounded(page.goto(site_lib.ORIGIN + path), seconds)
        except BaseException:
            await self.discard(context)
            raise
        return page, errors

    async def bounded(self, work: Awaitable[_T], seconds: float) -> _T:
        """Awaits work with a page; one that hangs takes the browser with it."""
        from playwright import async_api

        begun = self._chromium
        try:
            async with asyncio.timeout(seconds):
                return await work
        except (TimeoutError, async_api.TimeoutError) as error:
            if begun is self._chromium:  # else another page has ended it
                await self._kill()
            raise SlowPageError(f"the page took longer than {seconds:g} s") from error

    async def work(self, page: Any, work: Work[_T], seconds: float) -> _T:
        from playwright import async_api

        try:
            return await self.bounded(work(page), seconds)
        except async_api.Error as error:
            is_gone = page.is_closed() or not await self._is_alive()
            if is_gone or _is_closed(error) or _is_crash(error):
                raise _told(error) from error
            raise

    async def discard(self, context: Any) -> None:
        """Closes a context; the browser ends if that hangs."""
        from playwright import async_api

        try:
            async with asyncio.timeout(_SECONDS_TO_CLOSE):
                await context.close()
        except TimeoutError:
            if context.browser is self._chromium:
                await self._kill()
        except async_api.Error:
            pass  # it is closed

    async def _started(self) -> Any:
        from playwright import async_api

        async with self._starting:
            if self._chromium is not None and self._chromium.is_connected():
                return self._chromium
            self._idle.clear()
            self._num_pages = 0
            if self._driver is None:
                self._driver = await async_api.async_playwright().start()
                self._watching = asyncio.create_task(memory.watch())
            program, *words = chromium.command()
            try:
                self._chromium = await self._driver.chromium.launch(
                    executable_path=shutil.which(program),
                    args=words,
                    ignore_default_args=True,
                    timeout=_SECONDS_TO_START * 1000,
                )
            except async_api.Error as error:
                raise BrowserError(f"Chromium did not start: {error}") from error
            return self._chromium

    async def _is_alive(self) -> bool:
        return self._chromium is not None and self._chromium.is_connected()

    async def _kill(self) -> None:
        """Ends Chromium; the next page starts another."""
        old, self._chromium = self._chromium, None
        self._idle.clear()
        if old is not None:
            with contextlib.suppress(Exception):  # whatever it was, it is gone
                async with asyncio.timeout(_SECONDS_TO_CLOSE):
                    await old.close()

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        with self._guard:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="browser", daemon=True
                )
                self._thread.start()
            return self._loop

    def end(self) -> None:
        """Ends Chromium, the driver and the thread."""
        with self._guard:
            loop, self._loop = self._loop, None
        if loop is None:
            return
        assert self._thread is not None
        with contextlib.suppress(concurrent.futures.TimeoutError):
            stop = asyncio.run_coroutine_threadsafe(self._stop(), loop)
            stop.result(2 * _SECONDS_TO_CLOSE)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(_SECONDS_TO_CLOSE)
        loop.close()
        self._starting, self._gate = asyncio.Lock(), asyncio.Semaphore(_NUM_PAGES)

    async def _stop(self) -> None:
        await self._kill()
        driver, self._driver = self._driver, None
        if self._watching is not None:
            self._watching.cancel()
        if driver is not None:
            await driver.stop()


def _is_crash(error: Exception) -> bool:
    """Returns whether a page's own process has ended."""
    return "crashed" in str(error)


def _keep(errors: list[str], error: Exception) -> None:
    """Keeps the first errors of a page's scripts, cut: a page makes any number."""
    if len(errors) < _MOST_ERRORS:
        errors.append(str(error)[:_MOST_CHARACTERS])


def _is_closed(error: Exception) -> bool:
    """Returns whether the page, the browser or its driver has ended."""
    return type(error).__name__ == "TargetClosedError"  # which is not exported


def _told(error: Exception) -> Exception:
    """Returns what callers are told of an error of playwright."""
    if _is_crash(error):
        return SlowPageError("the page crashed, or took too much memory")
    return BrowserError(str(error))


async def _move(page: Any, shown: dict[str, Any], site: site_lib.Site) -> None:
    """Goes to the address of a site; until the next move the page leaves it for none.

    Args:
        page: of playwright.
        shown: what its routes know: the site, its address, and where it may go.
        site: the next one.
    """
    shown |= {"site": site, "address": site.address, "to": site.address}
    await page.goto(site.address)
    shown["to"] = ""


async def _serve(route: Any, site: site_lib.Site, address: str) -> None:
    """Answers a request with the site's file, and refuses all others."""
    found = site.find(route.request.url, address)
    if found is None:
        await route.abort()
    else:
        await route.fulfill(body=found[0], content_type=found[1])
