"""The judge of a page: named checks on three levels, each with a weight.

    markup      the source, and computed styles
    geometry    where the browser puts things
    pixels      what can be seen

A gate is a check whose failure earns the page nothing: the page is no slide of the
brief, or deceives. The score of other pages is the share of weights that are passed.
"""

import asyncio
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from glm5_jax.environments import browser
from glm5_jax.environments.browser import chromium
from glm5_jax.environments.worlds.slides import briefs, markup, measure, pixels

EDITION = 3  # counts changes of the checks
_EDGE = 32.0  # pixels from the slide's edges
_SLACK = 1.5  # pixels, of rounding
Check = Callable[[measure.Facts, briefs.Page], bool]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A check of a page.

    Attributes:
        level: "markup", "geometry" or "pixels".
        weight: share of a sound page's score; 0 for a gate.
        holds: whether a page passes.
    """

    level: str
    weight: int
    holds: Check

    @property
    def is_gate(self) -> bool:
        """Returns whether its failure earns nothing."""
        return self.weight == 0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found about a page."""

    score: float  # from 0 to 1
    failed: tuple[str, ...]  # names of RULES
    problems: tuple[str, ...] = ()  # of the markup

    @property
    def is_sound(self) -> bool:
        """Returns whether every check is passed."""
        return not self.failed


async def judge(
    renderer: browser.Browser,
    html: str,
    page: briefs.Page,
    images: dict[str, bytes],
) -> Verdict:
    """Renders a page and judges it.

    Args:
        renderer: the browser.
        html: of the page.
        page: of the brief.
        images: files that the deck may show.
    """
    facts = await measure.measure(renderer, html, images)
    return await asyncio.to_thread(verdict, facts, page)


def verdict(facts: measure.Facts, page: briefs.Page) -> Verdict:
    """Judges a page that was rendered."""
    if facts.problems:
        return Verdict(0.0, ("markup",), facts.problems)
    failed = [name for name, rule in RULES.items() if not rule.holds(facts, page)]
    if any(RULES[name].is_gate for name in failed):
        return Verdict(0.0, tuple(failed))
    lost = sum(RULES[name].weight for name in failed)
    return Verdict(1 - lost / sum(r.weight for r in RULES.values()), tuple(failed))


def version() -> str:
    """Names what scores depend on: the edition of the checks, and the fonts."""
    return f"slides-{EDITION}+fonts-{chromium.fonts()}"


def _words(facts: measure.Facts) -> Sequence[dict[str, Any]]:
    return facts.layout["words"]


def _blocks(facts: measure.Facts) -> list[dict[str, Any]]:
    """Returns the blocks that have words, with their texts in single blanks."""
    return [
        {**block, "text": " ".join(block["text"].split())}
        for block in facts.layout["blocks"]
    ]


def _is_markup(facts: measure.Facts, page: briefs.Page) -> bool:
    """Holds where the browser, too, finds nothing that is forbidden."""
    del page
    layout = facts.layout
    is_free = not markup.FORBIDDEN & set(layout["tags"])
    return is_free and not layout["backgrounds"]


def _is_document(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    layout = facts.layout
    is_alone = layout["slides"] == 1 and not layout["outside"]
    return is_alone and layout["mode"] == "CSS1Compat"


def _is_spaced(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    return all(
        0.9 <= word["lines"] <= 2.2
        and -0.06 <= word["letters"] <= 0.25
        and -0.2 <= word["gaps"] <= 0.5
        and 0 <= word["indent"] <= 80
        for word in _words(facts)
    )


def _has_no(key: str) -> Check:
    return lambda facts, page: not any(word[key] for word in _words(facts))


def _has_images(facts: measure.Facts, page: briefs.Page) -> bool:
    """Holds where the brief's picture and no other is shown, whole."""
    images = facts.layout["images"]
    wanted = {page.image} if page.image else set()
    return {i["source"] for i in images} == wanted and all(
        image["natural"][0] > 0 and _area(image["box"]) > 100 * 75 for image in images
    )


def _shows_images_once(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    sources = [image["source"] for image in facts.layout["images"]]
    return len(set(sources)) == len(sources)


def _has_heading(facts: measure.Facts, page: briefs.Page) -> bool:
    headings = [" ".join(text.split()) for text in facts.layout["headings"]]
    return headings == [page.title]


def _is_legible(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    return all(16 <= word["size"] <= 120 for word in _words(facts))


def _has_hierarchy(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    blocks = facts.layout["blocks"]
    tags = [blocks[word["block"]]["tag"] for word in _words(facts)]
    heads, rest = (
        [
            w["size"]
            for w, t in zip(_words(facts), tags, strict=True)
            if (t == "h1") == x
        ]
        for x in (True, False)
    )
    middle = sorted(rest)[len(rest) // 2] if rest else 0.0
    return bool(heads) and min(heads) >= max(28, 1.2 * middle)


def _at_most(key: str, most: int) -> Check:
    return lambda facts, page: len({word[key] for word in _words(facts)}) <= most


def _is_slide(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    wanted = 0, 0, measure.WIDTH, measure.HEIGHT
    layout = facts.layout
    return all(
        abs(side - want) <= 1
        for side, want in zip(layout["slide"], wanted, strict=True)
    ) and layout["window"] == [measure.WIDTH, measure.HEIGHT]


def _is_inside(edge: float) -> Check:
    """Makes a check that all texts and pictures lie inside the slide."""

    def holds(facts: measure.Facts, page: briefs.Page) -> bool:
        del page
        layout = facts.layout
        boxes = [box for word in _words(facts) for box in word["rects"]]
        boxes += [image["box"] for image in layout["images"]]
        left, top, right, bottom = layout["slide"]
        inner = left + edge, top + edge, right - edge, bottom - edge
        return all(_contains(inner, box) for box in boxes)

    return holds


def _is_uncut(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    texts = all(
        _contains(word["cut"], box) for word in _words(facts) for box in word["rects"]
    )
    images = facts.layout["images"]
    return texts and all(_contains(i["around"]["cut"], i["box"]) for i in images)


def _is_shown(facts: measure.Facts, page: briefs.Page) -> bool:
    """Holds where every text of the document has a place and a size."""
    del page
    return all(
        word["rects"]
        and not word["hidden"]
        and word["opacity"] >= 0.4
        and word["size"] >= 8
        and all(box[2] - box[0] >= 2 and box[3] - box[1] >= 6 for box in word["rects"])
        for word in _words(facts)
    )


def _has_content(facts: measure.Facts, page: briefs.Page) -> bool:
    """Holds where every required text is the text of an element, in order."""
    said = iter(block["text"] for block in _blocks(facts))
    return all(any(text == found for found in said) for text in page.required)


def _is_brief(facts: measure.Facts, page: briefs.Page) -> bool:
    wanted = sum(len(text.split()) for text in page.required)
    return len(_words(facts)) <= wanted + 12


def _repeats_nothing(facts: measure.Facts, page: briefs.Page) -> bool:
    long = [b["text"] for b in _blocks(facts) if len(b["text"].split()) > 2]
    return all(long.count(text) <= max(page.required.count(text), 1) for text in long)


def _has_no_overlaps(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    boxes = [(word["block"], box) for word in _words(facts) for box in word["rects"]]
    boxes += [(-1 - i, x["box"]) for i, x in enumerate(facts.layout["images"])]
    return not any(
        _common(one, other) > 0.15 * min(_area(one), _area(other))
        for (here, one), (there, other) in itertools.combinations(boxes, 2)
        if here != there
    )


def _is_aligned(facts: measure.Facts, page: briefs.Page) -> bool:
    """Holds where no two edges are close to each other but not the same."""
    del page
    edges: dict[str, list[float]] = {}
    for block in facts.layout["blocks"]:
        left, _, right, _ = block["inner"]
        side = block["align"].removeprefix("-webkit-")
        places = {"center": (left + right) / 2, "right": right, "end": right}
        kind = side if side in places else "left"
        edges.setdefault(kind, []).append(places.get(side, left))
    gaps = (
        b - a for found in edges.values() for a, b in itertools.pairwise(sorted(found))
    )
    return not any(2.5 < gap < 14 for gap in gaps)


def _has_rhythm(facts: measure.Facts, page: briefs.Page) -> bool:
    """Holds where the gaps between the items of a list are equal."""
    del page
    lists: dict[int, list[dict[str, Any]]] = {}
    for block in facts.layout["blocks"]:
        if block["tag"] in ("li", "p", "div", "tr"):
            lists.setdefault(block["parent"], []).append(block)
    return all(
        max(gaps) - min(gaps) <= 3
        for items in lists.values()
        if len(gaps := [*_gaps(items)]) > 1
    )


def _gaps(items: Sequence[dict[str, Any]]) -> Iterator[float]:
    for above, below in itertools.pairwise(items):
        if below["box"][1] >= above["box"][1] + 1:
            yield below["box"][1] - above["box"][3]


def _keeps_shapes(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    for image in facts.layout["images"]:
        left, top, right, bottom = image["box"]
        wide, high = image["natural"]
        is_kept = wide * high * (bottom - top) > 0 and (
            abs((right - left) / (bottom - top) / (wide / high) - 1) <= 0.05
        )
        if image["fit"] == "fill" and not is_kept:
            return False
    return True


def _contains(outer: measure.Box, box: measure.Box) -> bool:
    return (
        box[0] >= outer[0] - _SLACK
        and box[1] >= outer[1] - _SLACK
        and box[2] <= outer[2] + _SLACK
        and box[3] <= outer[3] + _SLACK
    )


def _area(box: measure.Box) -> float:
    return float(max(box[2] - box[0], 0) * max(box[3] - box[1], 0))


def _common(one: measure.Box, other: measure.Box) -> float:
    """Returns the area that two boxes share."""
    low = [max(a, b) for a, b in zip(one[:2], other[:2], strict=True)]
    high = [min(a, b) for a, b in zip(one[2:], other[2:], strict=True)]
    return _area([*low, *high])


def _is_inked(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    return all(
        pixels.is_inked(facts, box, len(word["text"]))
        for word in _words(facts)
        if re.search(r"\w", word["text"])
        for box in word["rects"]
    )


def _has_contrast(facts: measure.Facts, page: briefs.Page) -> bool:
    """Holds where texts have the contrast that WCAG asks for: 4.5, of large ones 3."""
    del page
    for word in _words(facts):
        is_large = word["size"] >= 24 or (
            word["size"] >= 18.6 and word["weight"] >= 700
        )
        least = 3.0 if is_large else 4.5
        if any(pixels.contrast(facts, box) < least for box in word["rects"]):
            return False
    return True


def _is_filled(facts: measure.Facts, page: briefs.Page) -> bool:
    del page
    share, empty = pixels.fill(facts.seen)
    return 0.12 <= share <= 0.9 and empty <= 0.55


RULES = {
    "markup": Rule("markup", 0, _is_markup),
    "document": Rule("markup", 0, _is_document),
    "unmoved": Rule("markup", 0, _has_no("moved")),
    "unmasked": Rule("markup", 0, _has_no("masked")),
    "still": Rule("markup", 0, _has_no("animated")),
    "spacing": Rule("markup", 0, _is_spaced),
    "heading": Rule("markup", 1, _has_heading),
    "images": Rule("markup", 2, _has_images),
    "images_once": Rule("markup", 1, _shows_images_once),
    "legible": Rule("markup", 2, _is_legible),
    "hierarchy": Rule("markup", 1, _has_hierarchy),
    "families": Rule("markup", 1, _at_most("family", 2)),
    "colours": Rule("markup", 1, _at_most("colour", 3)),
    "generated": Rule("markup", 1, lambda facts, page: not facts.layout["generated"]),
    "slide": Rule("geometry", 0, _is_slide),
    "inside": Rule("geometry", 0, _is_inside(0.0)),
    "uncut": Rule("geometry", 0, _is_uncut),
    "shown": Rule("geometry", 0, _is_shown),
    "content": Rule("geometry", 0, _has_content),
    "overlaps": Rule("geometry", 3, _has_no_overlaps),
    "boxes": Rule("geometry", 2, lambda facts, page: not facts.layout["overflowing"]),
    "margins": Rule("geometry", 1, _is_inside(_EDGE)),
    "aligned": Rule("geometry", 1, _is_aligned),
    "rhythm": Rule("geometry", 1, _has_rhythm),
    "shapes": Rule("geometry", 1, _keeps_shapes),
    "brevity": Rule("geometry", 1, _is_brief),
    "repeats": Rule("geometry", 1, _repeats_nothing),
    "ink": Rule("pixels", 0, _is_inked),
    "contrast": Rule("pixels", 3, _has_contrast),
    "whitespace": Rule("pixels", 2, _is_filled),
}
