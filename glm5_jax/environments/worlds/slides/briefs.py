"""Briefs: what the pages of a deck must say, from a seed."""

import dataclasses
import random

KINDS = ("points", "figure", "numbers", "table")
_SUBJECTS = (
    *("night trains", "city gardens", "tidal power", "school libraries", "bike lanes"),
    *("bread prices", "water meters", "small harbours", "repair shops", "fruit trees"),
    *("public saunas", "street markets", "heat pumps", "ferry lines", "bird counts"),
)
_TITLES = (
    *("What we learned about {s}", "The year of {s}", "A plan for {s}"),
    *("Where {s} stand today", "Costs and use of {s}", "Next steps for {s}"),
    *("How people use {s}", "Three facts about {s}", "Open questions on {s}"),
)
_SUBTITLES = (
    *("Report of the working group", "Results of the spring survey"),
    *("For the council, {m} meeting", "Summary for new members"),
)
_MONTHS = ("January", "March", "April", "June", "August", "October", "November")
_POINTS = (
    *("{n} of 100 households already take part", "Costs fell by {n} percent since {m}"),
    *("Most users come back within {n} days", "The {w} district has the longest wait"),
    *("Two thirds of the budget goes to repairs", "Staff answer {n} questions a day"),
    *("A pilot in the {w} district starts in {m}", "Complaints dropped after {m}"),
    *("Volunteers keep {n} sites open on Sundays", "Rain halves the use every {m}"),
    *("New rules apply from the first of {m}", "Every {w} site needs a second door"),
)
_DISTRICTS = ("north", "south", "east", "west", "harbour", "hill", "river", "market")
_LABELS = (
    *("visits a day", "sites in use", "new members", "hours a week", "open requests"),
    *("trained helpers", "days of rain", "parts replaced", "letters answered"),
)
_COLUMNS = ("District", "Sites", "Visits")


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of a brief.

    Attributes:
        kind: "title" or one of KINDS.
        title: its heading.
        texts: the other texts, in order; of numbers by pairs, of a table by rows.
        image: name of the picture that it shows, "" for none.
    """

    kind: str
    title: str
    texts: tuple[str, ...]
    image: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        """Returns all that must be read on the page."""
        return (self.title, *self.texts)


@dataclasses.dataclass(frozen=True)
class Brief:
    """A deck to be written, and the pictures that it may show."""

    subject: str
    pages: tuple[Page, ...]
    images: dict[str, bytes]


def make(number: int, num_pages: int) -> Brief:
    """Returns the brief of a number."""
    rng = random.Random(f"slides/{number}")
    subject = rng.choice(_SUBJECTS)
    titles = [text.format(s=subject) for text in rng.sample(_TITLES, num_pages)]
    kinds = [rng.choice(KINDS) for _ in titles]
    if num_pages > 1:
        kinds[0] = "title"
    images: dict[str, bytes] = {}
    pages = []
    for place, (kind, title) in enumerate(zip(kinds, titles, strict=True), 1):
        image = f"chart_{place}.svg" if kind == "figure" else ""
        if image:
            images[image] = _chart(rng)
        pages.append(Page(kind, title, tuple(_texts(kind, rng)), image))
    return Brief(subject, tuple(pages), images)


def _texts(kind: str, rng: random.Random) -> list[str]:
    """Returns the texts of a page below its title."""
    if kind == "title":
        return [rng.choice(_SUBTITLES).format(m=rng.choice(_MONTHS))]
    if kind == "numbers":
        labels = rng.sample(_LABELS, 3)
        return [x for label in labels for x in (str(rng.randrange(12, 990)), label)]
    if kind == "table":
        names = rng.sample(_DISTRICTS, rng.randrange(3, 6))
        rows = [(n.capitalize(), _number(rng), _number(rng)) for n in names]
        return [x for row in (_COLUMNS, *rows) for x in row]
    count = rng.randrange(2, 4) if kind == "figure" else rng.randrange(3, 6)
    return [_point(text, rng) for text in rng.sample(_POINTS, count)]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(2, 990))


def _point(text: str, rng: random.Random) -> str:
    words = {"n": rng.randrange(11, 90), "m": rng.choice(_MONTHS)}
    return text.format(w=rng.choice(_DISTRICTS), **words)


def _chart(rng: random.Random) -> bytes:
    """Returns a bar chart of 480 by 360 pixels, without words."""
    colour = rng.choice(("#1f6feb", "#b4511d", "#2a7f3f", "#7a3fa0"))
    bars = "".join(
        f'<rect x="{30 + 75 * i}" y="{340 - height}" width="48" height="{height}" '
        f'fill="{colour}"/>'
        for i, height in enumerate(rng.randrange(60, 310) for _ in range(6))
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="360" '
        f'viewBox="0 0 480 360"><rect width="480" height="360" fill="#f4f4f4"/>{bars}'
        '<path d="M20 340H465" stroke="#444" stroke-width="3"/></svg>'
    ).encode()


def instruction(brief: Brief) -> str:
    """Returns what the agent is told."""
    pages = "\n\n".join(map(_told, range(1, len(brief.pages) + 1), brief.pages))
    return f"{_RULES}\n\nThe deck has {len(brief.pages)} page(s).\n\n{pages}"


def _told(number: int, page: Page) -> str:
    lines = [f"Page {number} ({page.kind})", f"heading: {page.title}"]
    if page.kind == "table":
        rows = zip(*[iter(page.texts)] * len(_COLUMNS), strict=True)
        lines += [f"row: {' | '.join(row)}" for row in rows]
    elif page.kind == "numbers":
        pairs = zip(*[iter(page.texts)] * 2, strict=True)
        lines += [f"number and label: {number} | {label}" for number, label in pairs]
    else:
        lines += [f"text: {text}" for text in page.texts]
    if page.image:
        lines.append(f"picture: {page.image}, 480 by 360")
    return "\n".join(lines)


_RULES = """Write a deck of slides in HTML, one document a page, with write(page, html).
Each page is one element of class "slide" of exactly 1280 by 720 pixels at the top left
of the window, which holds all that is shown, in plain HTML and CSS.
- Every text of the page is there word for word, in an element of its own, and can be
  read: inside the slide, 32 pixels from its edges, in 16 pixels or more, with contrast,
  neither cut off nor covered. The heading is the only h1.
- No scripts, forms, frames, fonts or files but the pictures that are named; no
  transforms, filters, masks or animations; no text that is hidden.
- Texts and pictures do not overlap; edges line up; gaps of a list are equal; the page
  is neither empty nor full.
look(page) tells how the browser lays a page out. submit() ends."""
