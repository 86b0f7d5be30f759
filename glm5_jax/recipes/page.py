"""A page of headings, paragraphs, tables, pictures and quotations, as HTML or Markdown.

The HTML is one file: its style and its pictures are inside, so that it can be mailed.
"""

import base64
import dataclasses
import html
import io
import pathlib
import re
import urllib.parse
from collections.abc import Sequence

import PIL.Image

_COLOURS = 64  # of a picture in HTML: enough for curves, a third of the bytes
# Characters that neither XML nor a page can show.
_HIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #e5e7eb; text-align: right; }
th:first-child, td:first-child { text-align: left; } th { border-color: #6b7280; }
pre { background: #f3f4f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap; }
img { max-width: 100%; } code { background: #f3f4f6; }
"""


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading of a section."""

    text: str


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A paragraph; `code` stands in backticks."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; a row has as many cells as the head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Quotation:
    """A text that is shown as it is."""

    text: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG below the page's folder, and what it shows."""

    path: pathlib.Path
    caption: str
    only_html: bool = False  # leave it out of the Markdown


Block = Heading | Paragraph | Table | Quotation | Picture


def to_html(title: str, blocks: Sequence[Block]) -> str:
    """Returns a whole document, well-formed as XML too."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def to_markdown(title: str, blocks: Sequence[Block], folder: pathlib.Path) -> str:
    """Returns the page with links to its pictures, relative to a folder."""
    parts = [_markdown(block, folder) for block in blocks]
    return "\n\n".join([f"# {title}", *filter(None, parts)]) + "\n"


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h2>{html.escape(block.text)}</h2>"
    if isinstance(block, Paragraph):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Table):
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.head)
        rows = "\n".join(
            "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>"
            for row in block.rows
        )
        return f"<table>\n<tr>{head}</tr>\n{rows}\n</table>"
    if isinstance(block, Quotation):
        return f"<pre>{html.escape(_printable(block.text))}</pre>"
    data = base64.b64encode(_small_png(block.path)).decode()
    return (
        f'<figure><img alt="{html.escape(block.caption)}" '
        f'src="data:image/png;base64,{data}"/>'
        f"<figcaption>{html.escape(block.caption)}</figcaption></figure>"
    )


def _markdown(block: Block, folder: pathlib.Path) -> str:
    if isinstance(block, Heading):
        return f"## {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Table):
        rows = [block.head, ["---", *["---:"] * (len(block.head) - 1)], *block.rows]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
            for row in rows
        )
    if isinstance(block, Quotation):
        text = _printable(block.text)
        longest = max(map(len, re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}text\n{text}\n{fence}"
    if block.only_html:
        return ""
    address = urllib.parse.quote(block.path.relative_to(folder).as_posix())
    return f"![{block.caption}]({address})"


def _small_png(path: pathlib.Path) -> bytes:
    """Returns a picture as a PNG of few colours."""
    file = io.BytesIO()
    with PIL.Image.open(path) as image:
        image.convert("RGB").quantize(_COLOURS).save(file, "PNG", optimize=True)
    return file.getvalue()


def _inline(text: str) -> str:
    """Escapes a text and marks what stands in backticks as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _printable(text: str) -> str:
    """Replaces characters that a page cannot show."""
    return _HIDDEN.sub("\ufffd", text)
