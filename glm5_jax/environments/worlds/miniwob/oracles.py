"""Scripts that solve families of pages: from what a page asks, the calls that do it."""

import re
from collections.abc import Callable, Mapping, Sequence

from glm5_jax.environments.worlds.miniwob.page import Element

Call = tuple[str, int, str]  # "click" or "type", the element, the text
Oracle = Callable[[str, Sequence[Element]], list[Call]]


def _quoted(query: str) -> list[str]:
    return re.findall(r'"([^"]*)"', query)


def _click(elements: Sequence[Element], text: str | None, *kinds: str) -> Call:
    """Returns a click on the first element of a kind with a text, if one is given."""
    for number, one in enumerate(elements):
        if one.kind in kinds and text in (None, one.text):
            return ("click", number, "")
    raise ValueError(f"no {kinds} with the text {text!r}")


def _submit(elements: Sequence[Element]) -> Call:
    return _click(elements, "Submit", "button")


def _click_button(query: str, elements: Sequence[Element]) -> list[Call]:
    return [_click(elements, (_quoted(query) or [None])[0], "button")]


def _click_link(query: str, elements: Sequence[Element]) -> list[Call]:
    return [_click(elements, _quoted(query)[0], "a")]


def _click_test_2(query: str, elements: Sequence[Element]) -> list[Call]:
    wanted = re.findall(r"button (\w+)", query) or ["ONE"]
    return [_click(elements, wanted[0], "button")]


def _focus(query: str, elements: Sequence[Element]) -> list[Call]:
    del query
    return [_click(elements, None, "text")]


def _enter(query: str, elements: Sequence[Element]) -> list[Call]:
    (text,) = _quoted(query)
    fields = [n for n, e in enumerate(elements) if e.kind in ("text", "password")]
    return [*(("type", number, text) for number in fields), _submit(elements)]


def _choose(query: str, elements: Sequence[Element]) -> list[Call]:
    match = re.fullmatch(r"Select (.*) and click Submit\.", query)
    assert match is not None, query
    names = [] if match[1] == "nothing" else match[1].split(", ")
    clicks = [_click(elements, name, "checkbox", "radio") for name in names]
    return [*clicks, _submit(elements)]


ALL: Mapping[str, Oracle] = {
    "click-button": _click_button,
    "click-checkboxes": _choose,
    "click-link": _click_link,
    "click-option": _choose,
    "click-test": _click_button,
    "click-test-2": _click_test_2,
    "enter-password": _enter,
    "enter-text": _enter,
    "focus-text": _focus,
}
