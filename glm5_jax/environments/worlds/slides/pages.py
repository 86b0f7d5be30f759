"""Sound pages for a brief, in styles from a seed: the solution of a task."""

import dataclasses
import html
import random

from glm5_jax.environments.worlds.slides import briefs

_PALETTES = (  # ground, text, accent
    ("#ffffff", "#1c1c1c", "#1f4fa0"),
    ("#fbf7ee", "#2d2419", "#8a3b12"),
    ("#10222f", "#f2f5f7", "#ffd166"),
    ("#f3f8f4", "#12291b", "#1d6b3a"),
    ("#22172e", "#f4eefa", "#c9a7ff"),
    ("#f5f5f5", "#222222", "#a01f3c"),
)
_FAMILIES = (
    *("'DejaVu Sans', sans-serif", "'DejaVu Serif', serif"),
    "'DejaVu Sans Condensed', 'DejaVu Sans', sans-serif",
)


@dataclasses.dataclass(frozen=True)
class Style:
    """The looks of a deck."""

    ground: str
    text: str
    accent: str
    family: str
    margin: int  # pixels
    heading: int  # pixels
    body: int  # pixels
    is_centred: bool  # of title pages


def style(number: int) -> Style:
    """Returns the style of a number."""
    rng = random.Random(f"style/{number}")
    return Style(
        *rng.choice(_PALETTES),
        family=rng.choice(_FAMILIES),
        margin=rng.randrange(56, 81),
        heading=rng.randrange(44, 53),
        body=rng.randrange(26, 33),
        is_centred=rng.random() < 0.5,
    )


def render(page: briefs.Page, look: Style) -> str:
    """Returns the HTML of a page."""
    inner = _BODIES[page.kind](page)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(page.title)}</title>
<style>
{_css(page, look)}
</style></head>
<body><main class="slide {page.kind}">
{inner}
</main></body></html>
"""


def _css(page: briefs.Page, look: Style) -> str:
    side = "center" if page.kind == "title" and look.is_centred else "left"
    return f"""* {{ margin: 0; padding: 0; box-sizing: border-box; }}
.slide {{ width: 1280px; height: 720px; padding: {look.margin}px; display: flex;
  flex-direction: column; background: {look.ground}; color: {look.text};
  font-family: {look.family}; font-size: {look.body}px; line-height: 1.35; }}
h1 {{ font-size: {look.heading}px; color: {look.accent}; text-align: {side};
  padding-bottom: 24px; border-bottom: 4px solid {look.accent}; }}
.title {{ justify-content: center; }}
.title h1 {{ font-size: {look.heading + 12}px; }}
.sub {{ margin-top: 32px; text-align: {side}; }}
.main {{ flex: 1; display: flex; align-items: center; gap: 48px; }}
ul {{ list-style: none; flex: 1; }}
li {{ margin: 26px 0; padding-left: 24px; border-left: 6px solid {look.accent}; }}
img {{ width: 480px; height: 360px; }}
.cell {{ flex: 1; text-align: center; }}
.big {{ font-size: {look.heading + 20}px; color: {look.accent}; }}
table {{ width: 100%; border-collapse: collapse; }}
th, td {{ text-align: left; padding: 14px 16px;
  border-bottom: 2px solid {look.accent}; }}"""


def _items(page: briefs.Page) -> str:
    items = "\n".join(f"<li>{html.escape(text)}</li>" for text in page.texts)
    return f"<ul>\n{items}\n</ul>"


def _title(page: briefs.Page) -> str:
    return f'{_heading(page)}\n<p class="sub">{html.escape(page.texts[0])}</p>'


def _points(page: briefs.Page) -> str:
    return f'{_heading(page)}\n<div class="main">{_items(page)}</div>'


def _figure(page: briefs.Page) -> str:
    image = f'<img src="{page.image}" alt="bar chart">'
    return f'{_heading(page)}\n<div class="main">{_items(page)}{image}</div>'


def _numbers(page: briefs.Page) -> str:
    pairs = zip(*[iter(page.texts)] * 2, strict=True)
    cells = "\n".join(
        f'<div class="cell"><p class="big">{number}</p><p>{label}</p></div>'
        for number, label in pairs
    )
    return f'{_heading(page)}\n<div class="main">\n{cells}\n</div>'


def _table(page: briefs.Page) -> str:
    head, *rows = zip(*[iter(page.texts)] * 3, strict=True)
    lines = [f"<tr>{''.join(f'<th>{x}</th>' for x in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{x}</td>' for x in row)}</tr>" for row in rows]
    table = "\n".join(lines)
    return f'{_heading(page)}\n<div class="main"><table>\n{table}\n</table></div>'


def _heading(page: briefs.Page) -> str:
    return f"<h1>{html.escape(page.title)}</h1>"


_BODIES = {
    "title": _title,
    "points": _points,
    "figure": _figure,
    "numbers": _numbers,
    "table": _table,
}
