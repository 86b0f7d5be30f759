"""A front-end task: a brief, a checklist, a page that passes it, and flaws of it."""

import dataclasses
import random
from collections.abc import Callable, Mapping

Make = Callable[[random.Random], "Draft"]
Step = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Item:
    """A line of a checklist.

    Attributes:
        name: of the item, once in its checklist.
        statement: what a judge decides.
        steps: what decides it exactly, on a page just opened. The first word of a step
            is the action: click, type, press, choose, or one of the expectations
            reads, value, count, shown, hidden; then follow a CSS selector and a text.
    """

    name: str
    statement: str
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Flaw:
    """A change of the page that makes items fail."""

    old: str  # occurs once
    new: str
    fails: tuple[str, ...]  # names of items


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A task.

    Attributes:
        brief: what the page must do; it names the ids that the steps use.
        items: the checklist.
        page: text that passes all of them, HTML of a page.
        flaws: changes of it.
        framework: of a project, whose component `page` is then; "": it is a page.
    """

    brief: str
    items: tuple[Item, ...]
    page: str
    flaws: tuple[Flaw, ...]
    framework: str = ""

    def submissions(self) -> Mapping[str, str]:
        """Returns the page and its flawed versions, by a name for each."""
        found = {"reference": self.page}
        for flaw in self.flaws:
            assert self.page.count(flaw.old) == 1, flaw.old
            found["+".join(flaw.fails)] = self.page.replace(flaw.old, flaw.new)
        return found


def item(name: str, statement: str, *steps: str) -> Item:
    """Makes an item from steps such as "click #add; reads #total | 12"."""
    lines = (text for line in steps for text in line.split("; "))
    return Item(name, statement, tuple(map(_step, lines)))


def _step(text: str) -> Step:
    action, _, rest = text.partition(" ")
    return (action, *(part.strip() for part in rest.split("|", 1)))


def document(title: str, body: str, script: str) -> str:
    """Returns a page with a script."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title></head>\n<body>\n{body}\n<script>\n"
        "const $ = id => document.getElementById(id);\n"
        f"{script}\n</script>\n</body></html>\n"
    )
