"""A headless Chromium, confined in the sandbox, that renders what models write.

    browser = Browser()
    site = Site({"index.html": b"<h1>Hello</h1>"})
    title = await browser.run(site, lambda page: page.inner_text("h1"), seconds=5)
    session = await browser.open(site)      # a page that stays, with JavaScript
    browser.close()

chromium.py finds the program and its command, session.py serves pages.
"""

from glm5_jax.environments.browser.chromium import missing
from glm5_jax.environments.browser.session import (
    Browser,
    BrowserError,
    Session,
    SlowPageError,
)
from glm5_jax.environments.browser.site import ORIGIN, Site

__all__ = [
    "ORIGIN",
    "Browser",
    "BrowserError",
    "Session",
    "Site",
    "SlowPageError",
    "missing",
]
