"""Linux' manual pages as articles: Debian's packages manpages and manpages-dev.

A reference such as open(2) is a link. A page is filed under the headers that its
synopsis includes and its library, or else its section. It begins with its description,
so that the sentence that defines it comes first. Only pages in English of these two
packages are read, whatever else is installed, and braces of code are shown as
parentheses.
"""

import gzip
import pathlib
import re
from collections.abc import Iterator

from glm5_jax import config

Page = tuple[
    tuple[str, ...], tuple[str, ...], str
]  # names, what it is filed under, text
PLACE = pathlib.Path("/usr/share/man")
_LISTS = tuple(
    pathlib.Path(f"/var/lib/dpkg/info/{name}.list")
    for name in ("manpages", "manpages-dev")
)
_PAGE = re.compile(r"/.*/man/man\d/[^/]+\.\d\w*\.gz")  # in English
_SECTIONS = {
    "1": "user command",
    "2": "system call",
    "3": "library function",
    "4": "device",
    "5": "file format",
    "6": "game",
    "7": "overview",
    "8": "administration",
}
_REFERENCE = re.compile(r"(?<![\w.{])([A-Za-z_][\w.+-]*)\((\d)\w*\)")
_INCLUDE = re.compile(r"#\s*include\s+<([\w./]+)>")
_ESCAPES = (
    (re.compile(r"\\f(\[[^\]]*\]|\(..|.)|\\s[+-]?\d+|\\[&%|^/,:c]"), ""),
    (re.compile(r"\\(?:\(aq|\[aq\])"), "'"),
    (re.compile(r"\\(?:\(dq|\[dq\]|\(lq|\(rq)"), '"'),
    (re.compile(r"\\(?:\(e[nm]|\[e[nm]\]|\(mi|-)"), "-"),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\(?:e|\(rs|\[rs\])"), "\u0000"),  # a backslash, told at the end
    (re.compile(r"\\\*?(?:\(..|\[[^\]]*\]|.)"), ""),
)
_WORD = re.compile(r'"((?:[^"]|"")*)"|(\S+)')
_JOINED = ("BR", "RB", "BI", "IB", "IR", "RI")  # their words have no blanks between
_SPACED = ("B", "I", "R", "SM", "SB")
_NEW = ("PP", "P", "LP", "TP", "TQ", "IP", "HP", "sp", "EX", "EE", "nf", "fi")
_AS_IS, _FILLED = ("nf", "EX"), ("fi", "EE")
_EVERYWHERE = "Standard C library"
_HIDDEN = ("COLOPHON", "AUTHORS", "REPORTING BUGS")


def read() -> Iterator[Page]:
    """Yields the pages.

    Raises:
        config.InputError: the packages are not installed, or without their pages.
    """
    paths = [
        pathlib.Path(line)
        for listed in _LISTS
        if listed.is_file()
        for line in listed.read_text(encoding="utf-8").split("\n")
        if _PAGE.fullmatch(line)
    ]
    pages = {path: text for path in sorted(paths) if (text := _text(path))}
    if not pages:
        raise config.InputError(
            f"There are no manual pages in {PLACE}: apt-get install manpages "
            f"manpages-dev; an image may leave them out (dpkg's path-exclude)."
        )
    others: dict[str, list[str]] = {}  # names of pages that are another's
    for path, text in pages.items():
        if found := re.match(r"\.so (\S+)", text):
            others.setdefault(found[1], []).append(_name_of(path))
    for path, text in pages.items():
        yield from _page(path, text, others.get(_place(path), []))


def _text(path: pathlib.Path) -> str:
    """Returns a page's source; "" if it is a link or not there."""
    if not path.is_file() or path.is_symlink():
        return ""
    return gzip.decompress(path.read_bytes()).decode(errors="replace")


def _name_of(path: pathlib.Path) -> str:
    """Returns open(2) of /usr/share/man/man2/open.2.gz."""
    name, _, section = path.name.removesuffix(".gz").rpartition(".")
    return f"{name}({section[0]})"


def _place(path: pathlib.Path) -> str:
    return f"{path.parent.name}/{path.name.removesuffix('.gz')}"


def _page(path: pathlib.Path, source: str, more: list[str]) -> Iterator[Page]:
    """Yields a page, if it has a description; `more` are names of it."""
    sections = dict(_sections(source))
    told = sections.pop("DESCRIPTION", "").strip()
    if not told:
        return
    title = _name_of(path)
    section = title[-2]
    known = sections.get("NAME", "").partition(" - ")[0].replace("\n", " ")
    names = [f"{name.strip()}({section})" for name in known.split(",") if name.strip()]
    names = [*dict.fromkeys([title, *names, *more])]
    bare = [name.rpartition("(")[0] for name in names]
    headers = _INCLUDE.findall(sections.get("SYNOPSIS", ""))
    library = re.split(r"\s*\(", sections.get("LIBRARY", ""))[0].strip()
    tags = [f"header {name}" for name in headers]
    tags += [library] if library and library != _EVERYWHERE else []
    tags = [*dict.fromkeys(tags)] or [_SECTIONS[section]]
    others = {k: v for k, v in sections.items() if v and k not in _HIDDEN}
    text = "\n\n".join([told, *(f"{k}\n{v}" for k, v in others.items())])
    text = _REFERENCE.sub(r"{\1(\2)}", text)
    yield (*names, *dict.fromkeys(bare)), (*tags,), text


def _sections(source: str) -> Iterator[tuple[str, str]]:
    """Yields the titles and texts of a page's sections."""
    title, lines, is_filled = "", list[str](), True
    for line in source.split("\n"):
        macro, words = _macro(line)
        if macro == "SH":
            yield title, _joined(lines)
            title, lines, is_filled = " ".join(words), [], True
        elif macro in _NEW:
            is_filled = macro not in _AS_IS and (is_filled or macro in _FILLED)
            lines += ["", *([words[0], ""] if macro == "IP" and words else [])]
        elif macro == "SS":
            lines += ["", " ".join(words), ""]
        elif not macro or macro in (*_JOINED, *_SPACED):
            text = ("" if macro in _JOINED else " ").join(words)
            text = text if macro else _unescaped(line)
            is_next = is_filled and lines and lines[-1] and not text.startswith(" ")
            lines[-1:] = [f"{lines[-1]} {text}"] if is_next else [*lines[-1:], text]
    yield title, _joined(lines)


def _macro(line: str) -> tuple[str, list[str]]:
    """Returns the name and the words of a line with a macro, "" for a text."""
    if not line.startswith((".", "'")):
        return "", []
    name, _, rest = line[1:].strip().partition(" ")
    words = [quoted or plain for quoted, plain in _WORD.findall(rest)]
    return name or "\\", [_unescaped(word.replace('""', '"')) for word in words]


def _unescaped(text: str) -> str:
    """Returns a text without roff's escapes, and without braces."""
    for pattern, instead in _ESCAPES:
        text = pattern.sub(instead, text)
    return text.replace("\u0000", "\\").replace("{", "(").replace("}", ")")


def _joined(lines: list[str]) -> str:
    """Returns lines with one empty one between paragraphs."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
