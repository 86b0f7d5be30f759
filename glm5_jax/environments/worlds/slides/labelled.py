"""Pages whose verdicts are known by construction: sound ones, and one flaw each."""

import dataclasses
import random
from collections.abc import Iterator

from glm5_jax.environments.worlds.slides import briefs, flaws, pages


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A page whose faults are known."""

    html: str
    page: briefs.Page
    images: dict[str, bytes]
    flaw: str  # "" for a sound page


def make(num_each: int, first: int) -> Iterator[Labelled]:
    """Yields sound pages of every kind and pages of every flaw, so many of each.

    Args:
        num_each: of each flaw, and of sound pages of each kind.
        first: number of the first brief.
    """
    for kind in ("title", *briefs.KINDS):
        for number in range(num_each):
            page, images, html = _sound(first + number, (kind,))
            yield Labelled(html, page, images, "")
    for name, flaw in flaws.ALL.items():
        for number in range(num_each):
            rng = random.Random(f"{name}/{first + number}")
            page, images, html = _sound(rng.randrange(2**31), flaw.kinds)
            yield Labelled(flaw.make(html, page, rng), page, images, name)


def _sound(
    number: int, kinds: tuple[str, ...]
) -> tuple[briefs.Page, dict[str, bytes], str]:
    """Returns a page of one of the kinds, the pictures of its brief, and its HTML."""
    while True:
        brief = briefs.make(number, 3)
        found = [page for page in brief.pages if not kinds or page.kind in kinds]
        if found:
            page = found[number % len(found)]
            return page, brief.images, pages.render(page, pages.style(number))
        number += 1_000_003
