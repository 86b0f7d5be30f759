"""The chat page in a real Chromium, without a screen."""

import shutil
import unittest

from absl.testing import parameterized

from tests import environment
from tests.serving import scripted

try:
    from playwright import sync_api
except ImportError:
    sync_api = None

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-headless-shell")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
)
SECONDS = 30


@unittest.skipIf(sync_api is None, 'needs playwright: pip install -e ".[test]"')
@unittest.skipIf(CHROMIUM is None, "needs Chromium: apt-get install chromium")
class PageTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        started = scripted.serving(max_seconds=600.0, bounds=scripted.DRAFTING)
        cls.url, cls.model, _ = cls.enterClassContext(started)
        driver = cls.enterClassContext(sync_api.sync_playwright())
        cls.browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        cls.addClassCleanup(cls.browser.close)

    def open(self, key=scripted.KEY):
        """Opens the page as a user who answers the browser's prompt with a key."""
        credentials = {"username": "anybody", "password": key}
        context = self.browser.new_context(http_credentials=key and credentials)
        self.addCleanup(context.close)
        page = context.new_page()
        page.set_default_timeout(SECONDS * 1000)
        self.problems = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self.problems.append(said.text))
        self.status = page.goto(f"{self.url}/").status
        return page

    def say(self, page, text, is_whole=True):
        page.fill("#text", text)
        page.keyboard.press("Enter")
        if is_whole:
            self.expect(page, "!document.getElementById('send').disabled")

    def expect(self, page, condition):
        page.wait_for_function(condition)

    def sent(self, page):
        """Returns the bodies that the page will send."""
        bodies = []
        page.on("request", lambda x: x.method == "POST" and bodies.append(x))
        return bodies

    def aborted(self):
        return self.model.service.stats().ended.get("abort", 0)

    def test_a_conversation(self):
        page = self.open()
        self.assertEqual(self.status, 200)
        self.expect(page, f"document.title == '{scripted.NAME}'")
        page.evaluate(
            "seen = []; new MutationObserver(() => seen.push("
            "document.querySelector('.thought')?.textContent)).observe("
            "document.getElementById('talk'), {childList: true, subtree: true})"
        )
        self.say(page, "Hi")
        self.assertEqual(page.inner_text(".user"), "Hi")
        self.assertEqual(page.inner_text(".answer"), "Hé!")
        self.assertFalse(page.is_visible(".thought"))
        page.click("summary")
        self.assertEqual(page.inner_text(".thought"), "So")
        # Its first letter, which comes with the prompt's dispatch, came before.
        self.assertContainsSubset(["S", "So"], page.evaluate("seen"))
        # Rounds behind the prompt's S: o, </think>, the next four and the end.
        self.assertRegex(
            page.inner_text(".figures"),
            r"^8 tokens, [\d.]+ a second, the first after [\d.]+ s, 50% of first "
            "drafts kept$",
        )
        bodies = self.sent(page)
        page.uncheck("#thinking")
        page.fill("#temperature", "0")
        self.say(page, "And now?")
        self.assertEqual(page.locator("details:visible").count(), 1)
        body = bodies[-1].post_data_json
        said = [message["role"] for message in body["messages"]]
        self.assertEqual(said, ["user", "assistant", "user"])
        self.assertEqual(body["messages"][1]["reasoning_content"], "So")
        self.assertEqual(body["temperature"], 0)
        self.assertEmpty(self.problems)

    def test_stop(self):
        page, before = self.open(), self.aborted()
        self.model.service.pause().result()
        self.addCleanup(lambda: self.model.service.resume().result())
        self.say(page, "Hi", is_whole=False)
        self.assertTrue(page.is_disabled("#send"))
        page.click("#stop")
        self.expect(page, "!document.getElementById('send').disabled")
        self.assertIn("stopped", page.inner_text(".figures"))
        scripted.wait_until(lambda: self.aborted() == before + 1)
        self.assertEqual(page.locator(".error").count(), 0)

    def test_a_new_conversation_forgets_the_one_under_way(self):
        page, before = self.open(), self.aborted()
        self.model.service.pause().result()
        self.say(page, "Hi", is_whole=False)
        page.click("#clear")
        scripted.wait_until(lambda: self.aborted() == before + 1)
        self.model.service.resume().result()
        bodies = self.sent(page)
        self.say(page, "Ho")
        messages = bodies[-1].post_data_json["messages"]
        self.assertEqual(messages, [{"role": "user", "content": "Ho"}])
        self.assertEqual(page.locator(".user").count(), 1)

    def test_an_error_is_shown_and_the_message_can_be_sent_again(self):
        page = self.open()
        long = "x" * scripted.CAPACITY
        self.say(page, long)
        self.assertIn("Shorten the prompt", page.inner_text(".error"))
        self.assertEqual(page.input_value("#text"), long)
        self.say(page, "Hi")
        self.assertEqual(page.locator(".answer").last.inner_text(), "Hé!")

    @parameterized.parameters(None, "wrong")
    def test_without_the_key_there_is_no_page(self, key):
        """A browser without a screen cannot show its prompt, and gives up."""
        try:
            page = self.open(key)
        except sync_api.Error as error:
            self.assertIn("INVALID_AUTH_CREDENTIALS", str(error))
        else:
            self.assertEqual(self.status, 401)
            self.assertNotIn("<form", page.content())


if __name__ == "__main__":
    environment.main()
