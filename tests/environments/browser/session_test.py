"""The browser: what it serves, what it shuts off, and that it survives bad pages."""

import asyncio
import contextlib
import importlib.util
import os
import pathlib
import shutil
import unittest
from unittest import mock

from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.environments import browser
from glm5_jax.environments.browser import chromium, memory
from glm5_jax.environments.browser import session as session_lib
from glm5_jax.environments.sandbox import bubblewrap, processes

MISSING = browser.missing()
ENDED = FileNotFoundError, ProcessLookupError  # of a process that has
PICTURE = b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='20'></svg>"


def site(body, **files):
    text = f"<!doctype html><title>first</title>{body}".encode()
    return browser.Site({"index.html": text, **files})


def descendants(pid):
    found = processes.children(pid)
    return [*found, *(below for child in found for below in descendants(child))]


def chromiums():
    """Returns the processes of Chromium that this process started.

    Those of pages come and go meanwhile.
    """
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(*ENDED):
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"--remote-debugging-pipe" in words and b"bwrap" not in words:
                found.append(pid)
    return found


class MissingTest(parameterized.TestCase):
    def test_what_is_missing_is_said_with_its_remedy(self):
        with (
            mock.patch.object(importlib.util, "find_spec", return_value=None),
            self.assertRaisesRegex(config.InputError, r"playwright.*glm5_jax\[browser"),
        ):
            browser.Browser()
        with (
            mock.patch.object(importlib.util, "find_spec"),
            mock.patch.object(shutil, "which", return_value=None),
            self.assertRaisesRegex(config.InputError, "apt-get install chromium"),
        ):
            browser.Browser()


@unittest.skipIf(MISSING, MISSING)
class BrowserTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.close)

    def run_page(self, page_site, work, seconds=20.0):
        return asyncio.run(self.browser.run(page_site, work, seconds))

    def test_files_of_the_site_are_there_and_nothing_else(self):
        body = "<img src=a.svg><img src=b.svg><img src='http://example.org/c.svg'>"

        async def work(page):
            return await page.evaluate("[...document.images].map(i => i.naturalHeight)")

        self.assertEqual(
            self.run_page(site(body, **{"a.svg": PICTURE}), work), [20, 0, 0]
        )
        # A page is used again, with the files of another site.
        self.assertEqual(
            self.run_page(site(body, **{"b.svg": PICTURE}), work), [0, 20, 0]
        )

    def test_scripts_run_in_sessions_alone(self):
        scripted = site("<script>document.title = 'second'; nothing()</script>")
        self.assertEqual(self.run_page(scripted, lambda page: page.title()), "first")

        async def play():
            session = await self.browser.open(scripted)
            found = await session.run(lambda page: page.title(), 5.0)
            await session.close()
            return found, session.errors

        self.assertEqual(asyncio.run(play()), ("second", ["nothing is not defined"]))

    def test_the_first_errors_of_scripts_are_kept(self):
        errors = []
        for i in range(100):
            session_lib._keep(errors, ValueError(f"{i} {'x' * 10_000}"))
        self.assertLen(errors, 16)
        self.assertStartsWith(errors[-1], "15 xxx")
        self.assertEqual({len(error) for error in errors}, {500})

    def test_a_page_that_hangs_is_told_from_those_beside_it(self):
        async def hang(page):
            await page.evaluate("while (true);")

        async def play():
            good = [
                self.browser.run(site(""), lambda page: page.title(), 30.0)
                for _ in range(2)
            ]
            slow = self.browser.run(site(""), hang, 0.5)
            return await asyncio.gather(slow, *good, return_exceptions=True)

        slow, *good = asyncio.run(play())
        self.assertIsInstance(slow, browser.SlowPageError)
        self.assertEqual(good, ["first", "first"])

    def test_two_pages_that_hang_end_one_browser(self):
        """The second one is late when another browser has been started."""
        life, old, new = session_lib._Life(), mock.Mock(), mock.Mock()
        old.close, new.close = mock.AsyncMock(), mock.AsyncMock()

        async def hang():
            await asyncio.sleep(1000)

        async def play():
            life._chromium = old
            works = [life.bounded(hang(), seconds) for seconds in (0.01, 0.2)]
            first, second = map(asyncio.ensure_future, works)
            with self.assertRaises(browser.SlowPageError):
                await first
            life._chromium = new
            with self.assertRaises(browser.SlowPageError):
                await second

        asyncio.run(play())
        old.close.assert_called_once()
        new.close.assert_not_called()
        self.assertIs(life._chromium, new)

    def test_a_page_that_takes_too_much_memory_crashes_alone(self):
        script = "window.kept = []; setInterval(() => kept.push("
        script += "new Uint8Array(2 ** 26).fill(1)), 20)"

        async def play():
            good, bad = [
                await self.browser.open(site(body))
                for body in ("<p>good</p>", f"<script>{script}</script>")
            ]
            with self.assertRaisesRegex(browser.SlowPageError, "crashed, or took too"):
                await bad.run(lambda page: page.wait_for_timeout(60_000), 60)
            text = await good.run(lambda page: page.inner_text("p"), 60)
            for session in (good, bad):
                await session.close()
            return text

        # It watches from the start of the browser on, which another test may have done.
        self.browser.close()
        with mock.patch.multiple(memory, MOST_BYTES=6e8, _WATCH_SECONDS=0.1):
            self.assertEqual(asyncio.run(play()), "good")

    def test_a_page_cannot_take_another_one_away(self):
        away = site("<meta http-equiv=refresh content='0;url=http://site.test/x'>")
        self.run_page(away, lambda page: asyncio.sleep(0.3))

        async def work(page):
            await asyncio.sleep(0.3)
            return page.url, await page.title()

        self.assertEqual(self.run_page(site(""), work), (site("").address, "first"))

    @unittest.skipIf(bubblewrap.missing(), "needs bubblewrap")
    def test_it_is_confined_and_leaves_no_process(self):
        self.run_page(site(""), lambda page: page.title())
        found = chromiums()
        self.assertNotEmpty(found)
        own, seen = os.readlink("/proc/self/ns/net"), 0
        for pid in found:
            with contextlib.suppress(*ENDED):
                status = pathlib.Path(f"/proc/{pid}/status").read_text()
                self.assertIn("CapEff:\t0000000000000000", status)
                self.assertIn("NoNewPrivs:\t1", status)
                if os.geteuid() == 0:
                    self.assertNotEqual(os.readlink(f"/proc/{pid}/ns/net"), own)
                seen += 1
        self.assertGreater(seen, 0)
        self.browser.close()  # another test starts it again
        self.assertEmpty(chromiums())

    def test_fonts_have_a_digest(self):
        self.assertRegex(chromium.fonts(), "^[0-9a-f]{12}$")
        chromium.fonts.cache_clear()
        self.addCleanup(chromium.fonts.cache_clear)
        before = chromium.fonts()
        chromium.fonts.cache_clear()
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "new.ttf").write_bytes(b"font")
        with mock.patch.object(chromium, "_FONTS", (*chromium._FONTS, str(folder))):
            self.assertNotEqual(chromium.fonts(), before)


if __name__ == "__main__":
    absltest.main()
