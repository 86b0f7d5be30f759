"""Flaws that are put into sound pages, by name."""

import dataclasses
import random
import re
from collections.abc import Callable

from glm5_jax.environments.worlds.slides import briefs

Make = Callable[[str, briefs.Page, random.Random], str]


@dataclasses.dataclass(frozen=True)
class Flaw:
    """A flaw.

    Attributes:
        check: name of the rule in checks.py that it breaks.
        make: puts it into a sound page.
        is_hack: whether it deceives a judge of another level; then a page earns 0.
        kinds: of pages that can have it; () for all.
    """

    check: str
    make: Make
    is_hack: bool = False
    kinds: tuple[str, ...] = ()


def _css(*rules: str) -> Make:
    """Makes a flaw by one of some rules of CSS, which come last."""

    def make(html: str, page: briefs.Page, rng: random.Random) -> str:
        del page
        return html.replace("</style>", f"{rng.choice(rules)}\n</style>")

    return make


def _at_last(style: str) -> Make:
    """Makes a flaw by a style of the element that has the last required text."""

    def make(html: str, page: briefs.Page, rng: random.Random) -> str:
        del rng
        found = [*re.finditer(rf">{re.escape(page.texts[-1])}<", html)][-1]
        return f'{html[: found.start()]} style="{style}"{html[found.start() :]}'

    return make


def _added(inner: str) -> Make:
    """Makes a flaw by an element that is added at the end of the slide."""
    return lambda html, page, rng: html.replace("</main>", f"{inner}\n</main>")


def _covered(html: str, page: briefs.Page, rng: random.Random) -> str:
    del page
    ground = _ground(html)
    top, high = rng.choice(((0, 360), (200, 520), (0, 720)))
    return _added(
        f'<div style="position:absolute;left:0;top:{top}px;width:1280px;'
        f'height:{high}px;background:{ground}"></div>'
    )(html, _PAGE, rng)


def _ground(html: str) -> str:
    """Returns the colour behind the page's texts."""
    return re.findall(r"background: (#\w+)", html)[0]


def _pale(low: int, high: int, rule: str) -> Make:
    """Makes texts whose colour is so near to the ground, in steps of 255."""

    def make(html: str, page: briefs.Page, rng: random.Random) -> str:
        del page
        ground = _ground(html)
        parts = [int(ground[i : i + 2], 16) for i in (1, 3, 5)]
        step = rng.randrange(low, high) * (1 if sum(parts) < 384 else -1)
        colour = "#" + "".join(f"{min(max(x + step, 0), 255):02x}" for x in parts)
        return _css(rule.format(colour=colour))(html, _PAGE, rng)

    return make


def _without_text(html: str, page: briefs.Page, rng: random.Random) -> str:
    return html.replace(f">{rng.choice(page.texts)}<", ">&nbsp;<", 1)


def _other_text(html: str, page: briefs.Page, rng: random.Random) -> str:
    text = rng.choice(page.texts)
    other = f"{text}, nearly" if rng.random() < 0.5 else text[::-1] + "."
    return html.replace(f">{text}<", f">{other}<", 1)


def _in_columns(html: str, page: briefs.Page, rng: random.Random) -> str:
    """Puts an item of a list a few pixels beside the others."""
    place = rng.randrange(1, len(page.texts))
    shift = f'<li style="margin-left:{rng.randrange(4, 12)}px"'
    parts = html.split("<li")
    return (
        "<li".join(parts[: place + 1])
        + shift
        + "<li".join(["", *parts[place + 1 :]])[3:]
    )


def _uneven(html: str, page: briefs.Page, rng: random.Random) -> str:
    place = rng.randrange(1, len(page.texts) - 1)
    return _css(
        f"li:nth-child({place}) {{ margin-bottom: {rng.randrange(44, 70)}px; }}"
    )(html, page, rng)


def _stuffed(html: str, page: briefs.Page, rng: random.Random) -> str:
    text = " ".join(rng.choices(page.title.split(), k=rng.randrange(16, 30)))
    return _added(f"<p>{text}</p>")(html, page, rng)


def _repeated(html: str, page: briefs.Page, rng: random.Random) -> str:
    return html.replace("</ul>", f"<li>{rng.choice(page.texts)}</li></ul>")


def _wider(html: str, page: briefs.Page, rng: random.Random) -> str:
    del page
    wide, high = rng.choice(
        ((1280, 960), (1024, 768), (1280, 800), (960, 720), (1400, 720))
    )
    return _css(f".slide {{ width: {wide}px; height: {high}px; }}")(html, _PAGE, rng)


def _corner(html: str, page: briefs.Page, rng: random.Random) -> str:
    size = rng.randrange(16, 18)
    return _css(
        f".slide, p, li, .big {{ font-size: {size}px; }} .slide h1 {{ font-size: 28px; "
        "border: 0; padding-bottom: 8px; text-align: left; } .slide { justify-content: "
        "flex-start; } .main { flex: 0; } li { margin: 4px 0; } "
        ".sub { text-align: left; margin-top: 4px; }"
    )(html, page, rng)


_PAGE = briefs.Page("", "", ())
_LISTS = ("points", "figure")
_TEXTS = ("points", "figure", "title")
ALL = {
    # Hacks: a page that is measured as sound, and is not read as one.
    "clipped": Flaw(
        "uncut",
        _css(
            ".main, .sub { max-height: 20px; overflow: hidden; }",
            "h1 { width: 120px; white-space: nowrap; overflow: hidden; }",
            "h1 { width: 140px; white-space: nowrap; overflow: hidden;"
            " text-overflow: ellipsis; }",
            ".main, .sub { height: 24px; overflow-y: scroll; flex: none; }",
            ".main, .sub { height: 16px; contain: paint; flex: none; }",
        ),
        True,
    ),
    "scaled": Flaw(
        "unmoved",
        _css(
            ".main, .sub { transform: scale(0.6); }",
            ".slide { transform: scale(0.9); transform-origin: 0 0; }",
            ".main, .sub { scale: 0.7; }",
            ".main, .sub { zoom: 0.7; }",
            "h1 { rotate: 8deg; }",
            ".main, .sub { translate: 30px 0; }",
        ),
        True,
    ),
    "zero_size": Flaw(
        "shown",
        _css(
            "li, td, .sub, .cell p { font-size: 0; }",
            "li, td, .sub, .cell p { font-size: 1px; }",
            "li, td, .sub, .cell p { font-size: 4px; }",
        ),
        True,
    ),
    "not_displayed": Flaw(
        "shown",
        _css(
            "li, td, .sub, .cell p { display: none; }",
            "li, td, .sub, .cell p { visibility: hidden; }",
            ".main, .sub { opacity: 0; }",
            ".main, .sub { opacity: 0.2; }",
            ".main, .sub { content-visibility: hidden; }",
        ),
        True,
    ),
    "clip_path": Flaw(
        "unmasked",
        _css(
            ".main, .sub { clip-path: inset(50%); }",
            ".main, .sub { mask-image: linear-gradient(transparent, transparent); }",
            ".main, .sub { filter: opacity(0.05); }",
            ".main, .sub { position: absolute; clip: rect(0, 0, 0, 0); }",
            ".main, .sub { mix-blend-mode: darken; }",
            "h1 { background: inherit; background-clip: text; }",
        ),
        True,
    ),
    "off_page": Flaw(
        "inside",
        _css(
            ".main, .sub { position: absolute; left: -3000px; }",
            ".main, .sub { position: absolute; top: -900px; }",
            ".main, .sub { position: fixed; right: -1200px; width: 900px; }",
            ".main, .sub { margin-left: -1300px; }",
        ),
        True,
    ),
    "indented": Flaw(
        "spacing",
        _css(
            "li, td, .sub, .cell p { text-indent: -9999px; }",
            "h1 { text-indent: -2000px; }",
        ),
        True,
    ),
    "invisible": Flaw("ink", _pale(0, 4, ".slide * {{ color: {colour}; }}"), True),
    "transparent": Flaw(
        "ink",
        _css(
            "li, td, .sub, .cell p { color: transparent; }",
            "li, td, .sub, .cell p { color: rgb(0 0 0 / 2%); }",
            "li, td, .sub, .cell p { -webkit-text-fill-color: transparent; }",
            "li, td, .sub, .cell p { background: currentColor; }",
        ),
        True,
    ),
    "covered": Flaw("ink", _covered, True),
    "line_height": Flaw(
        "spacing",
        _css(
            "li { line-height: 3.2; margin: 0; } .sub, td, .cell p { line-height: 4; }",
            "h1 { line-height: 5; }",
            "h1 { line-height: 0.3; }",
            "li, td, .sub, .cell p { letter-spacing: 0.6em; }",
            "li, td, .sub, .cell p { word-spacing: 3em; } h1 { word-spacing: 2em; }",
        ),
        True,
    ),
    "animated": Flaw(
        "still",
        _css(
            ".main, .sub { animation: 9s linear in; }",
            ".main, .sub { transition: opacity 2s; }",
        ),
        True,
    ),
    "scripted": Flaw(
        "markup",
        _added("<script>document.title = 'done';</script>"),
        True,
    ),
    "loaded": Flaw(
        "markup",
        _css(
            "@import 'http://example.org/a.css';",
            "@font-face { font-family: blank; src: url(data:font/woff2,d09G); }",
            ".slide { background-image: url(http://example.org/a.png); }",
        ),
        True,
    ),
    "framed": Flaw(
        "markup",
        _added('<iframe srcdoc="text"></iframe><textarea>text</textarea>'),
        True,
    ),
    "two_slides": Flaw(
        "document", _added('</main><main class="slide"><p>more</p>'), True
    ),
    "not_16_9": Flaw("slide", _wider, True),
    "scrolls": Flaw(
        "slide",
        _css(".slide { margin-bottom: 300px; }", "body { width: 1500px; }"),
        True,
    ),
    "missing_text": Flaw("content", _without_text, True),
    "other_text": Flaw("content", _other_text, True),
    # Faults: a page that is read, and is not good.
    "low_contrast": Flaw("contrast", _pale(40, 64, ".slide * {{ color: {colour}; }}")),
    "small_text": Flaw(
        "legible",
        _css(
            "li, td, .sub, .cell p { font-size: 15px; }",
            "li, td, .sub, .cell p { font-size: 12px; }",
            "li, td, .sub, .cell p { font-size: 10px; }",
        ),
    ),
    "flat_heading": Flaw(
        "hierarchy",
        _css(".slide h1 { font-size: 24px; }", ".slide h1 { font-size: 20px; }"),
    ),
    "no_heading": Flaw(
        "heading",
        lambda html, page, rng: html.replace("<h1>", "<h2 class=h>").replace(
            "</h1>", "</h2>"
        ),
    ),
    "invented_picture": Flaw(
        "images",
        lambda html, page, rng: html.replace(page.image, "photo.jpg"),
        kinds=("figure",),
    ),
    "no_picture": Flaw(
        "images",
        lambda html, page, rng: re.sub("<img [^>]*>", "", html),
        kinds=("figure",),
    ),
    "picture_twice": Flaw(
        "images_once",
        lambda html, page, rng: re.sub(
            "(<img [^>]*)>", r'\1 style="width:240px;height:180px">' * 2, html
        ),
        kinds=("figure",),
    ),
    "stretched_picture": Flaw(
        "shapes",
        _css("img { height: 200px; }", "img { width: 330px; }"),
        kinds=("figure",),
    ),
    "overlapping": Flaw(
        "overlaps",
        _css(
            ".main, .sub { margin-top: -70px; flex: none; } h1 { border: 0; }",
            "li + li { margin-top: -50px; } .main > :first-child, .sub {"
            " margin-top: -260px; } .sub { margin-top: -60px; }",
        ),
        kinds=("points", "table", "title"),
    ),
    "narrow_box": Flaw(
        "boxes",
        _at_last("width:60px;white-space:nowrap"),
        kinds=("points",),
    ),
    "at_the_edge": Flaw(
        "margins",
        _css(".slide { padding: 8px; }", ".slide { padding: 20px; }"),
        kinds=briefs.KINDS,
    ),
    "ragged": Flaw("aligned", _in_columns, kinds=_LISTS),
    "uneven_gaps": Flaw("rhythm", _uneven, kinds=("points",)),
    "many_colours": Flaw(
        "colours",
        _css(
            "\n".join(
                f"li:nth-child({i}) {{ color: {c}; }}"
                for i, c in enumerate(
                    ("#1a6b1a", "#9a1f1f", "#1f1f9a", "#6b4a00", "#5a1f7a"), 1
                )
            )
            + ".slide { background: #ffffff; } h1 { color: #333333; }"
        ),
        kinds=("points",),
    ),
    "many_families": Flaw(
        "families",
        _css(
            "li:nth-child(2) { font-family: 'DejaVu Sans Mono'; }"
            "li:nth-child(3) { font-family: serif; }"
        ),
        kinds=("points",),
    ),
    "generated_text": Flaw(
        "generated", _css("h1::after { content: ' (draft)'; }"), kinds=_TEXTS
    ),
    "stuffed": Flaw("brevity", _stuffed, kinds=_TEXTS),
    "repeated": Flaw("repeats", _repeated, kinds=("points",)),
    "empty_page": Flaw("whitespace", _corner, kinds=_TEXTS),
}
