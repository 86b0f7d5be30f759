"""The markup of a page, read before a browser sees it."""

import html.parser
import re
from collections.abc import Collection

MOST_CHARACTERS = 40_000  # of a page
# What runs, loads, navigates, takes input or hides text by itself.
FORBIDDEN = frozenset(
    (
        *("script", "iframe", "frame", "frameset", "object", "embed", "applet", "link"),
        *("base", "form", "input", "textarea", "select", "button", "video", "audio"),
        *("canvas", "template", "details", "dialog", "noscript", "marquee", "portal"),
        *("foreignobject", "animate", "set", "use", "image", "meter", "progress"),
    )
)
_CSS = re.compile(r"@(import|font-face|keyframes|property|namespace|layer)", re.I)
_URL = re.compile(r"(?:url|src|image-set|image)\s*\(\s*['\"]?([^'\")]*)", re.I)


def problems(text: str, images: Collection[str]) -> tuple[str, ...]:
    """Returns what keeps a page from being rendered; () if nothing does.

    Args:
        text: HTML of the page.
        images: names of files that it may show.
    """
    if len(text) > MOST_CHARACTERS:
        return (f"the page is longer than {MOST_CHARACTERS} characters",)
    reader = _Reader()
    reader.feed(text)
    reader.close()
    found = reader.found
    if not re.match(r"\s*<!doctype html>", text, re.I):
        found.append("there is no <!doctype html>")
    # Escapes would hide a word of CSS from the search.
    styles = "\n".join(reader.styles)
    if "\\" in styles:
        found.append("a style has a backslash")
    if rule := _CSS.search(styles):
        found.append(f"a style has @{rule[1].lower()}")
    for name in _URL.findall(styles):
        if name not in images:
            found.append(f"a style loads {name[:40]!r}")
    return tuple(dict.fromkeys(found))


class _Reader(html.parser.HTMLParser):
    """Collects the styles and what is forbidden."""

    def __init__(self) -> None:
        """Starts with nothing found."""
        super().__init__()
        self.found: list[str] = []
        self.styles: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        if tag in FORBIDDEN:
            self.found.append(f"<{tag}> is forbidden")
        for name, value in attrs:
            if name.startswith("on") or name in ("srcdoc", "srcset", "hidden"):
                self.found.append(f"the attribute {name} is forbidden")
            if name == "http-equiv" and (value or "").lower() != "content-type":
                self.found.append("<meta http-equiv> is forbidden")
            if name == "name" and tag != "meta":  # it hides a method of the document
                self.found.append("the attribute name is forbidden")
            if name == "style":
                self.styles.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag == "style":
            self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.styles.append(data)
