"""A collection of articles that link to each other.

Links are names in braces: "the {C} of {Kernighan}". FOLDOC, the Free On-line Dictionary
of Computing (Debian's package dict-foldoc), is written so; Linux' manual pages are read
as if they were (manuals.py). A file of one's own has JSON lines {"title": string,
"text": string, "names": [string], "tags": [string]}, of which the last two may be
missing.
"""

import collections
import dataclasses
import functools
import gzip
import json
import pathlib
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from glm5_jax import config
from glm5_jax.environments.worlds.search import manuals

FOLDOC = pathlib.Path("/usr/share/dictd/foldoc")
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"
_LINK = re.compile(r"\{([^{}]+)\}")
_TAGS = re.compile(r"\s*<([^<>]{1,80})>\s*")
_YEAR = re.compile(r"\b(1[89]\d\d|20\d\d)\b(?!-\d)")
_MAX_NAME = 80


@dataclasses.dataclass(frozen=True)
class Article:
    """An article.

    Attributes:
        names: it is known by, the title first.
        tags: what it is filed under.
        text: with its links in braces.
    """

    names: tuple[str, ...]
    tags: tuple[str, ...]
    text: str

    @property
    def title(self) -> str:
        """Returns the first name."""
        return self.names[0]

    @functools.cached_property
    def links(self) -> tuple[str, ...]:
        """Returns the normalized names of its links, each once."""
        return links_of(self.text)

    @functools.cached_property
    def years(self) -> frozenset[str]:
        """Returns the years from 1800 that the text mentions; no dates of edits."""
        return frozenset(_YEAR.findall(self.text))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Articles and the links between them, by the articles' numbers."""

    articles: tuple[Article, ...]
    targets: tuple[tuple[int, ...], ...]  # of an article's links, in the text's order
    sources: tuple[tuple[int, ...], ...]  # articles that link to it
    by_name: Mapping[str, int]  # normalized names

    def find(self, name: str) -> int | None:
        """Returns the article of a name; None if there is none."""
        return self.by_name.get(normalize(name))


def normalize(name: str) -> str:
    """Returns a name in lower case with single blanks."""
    return " ".join(name.split()).casefold()


def links_of(text: str) -> tuple[str, ...]:
    """Returns the normalized names in braces, each once, in their order."""
    return tuple(dict.fromkeys(map(normalize, _LINK.findall(text))))


def plain(text: str) -> str:
    """Returns a text without the braces of its links."""
    return _LINK.sub(r"\1", text)


def link(articles: list[Article]) -> Graph:
    """Resolves the links; of several articles with one name, the first has it."""
    by_name: dict[str, int] = {}
    for number, article in enumerate(articles):
        by_name.setdefault(normalize(article.title), number)
    for number, article in enumerate(articles):
        for name in article.names:
            by_name.setdefault(normalize(name), number)
    targets, sources = [], collections.defaultdict(list)
    for number, article in enumerate(articles):
        found = (by_name.get(name) for name in article.links)
        there = dict.fromkeys(n for n in found if n is not None and n != number)
        targets.append(tuple(there))
        for target in there:
            sources[target].append(number)
    into = tuple(tuple(sources[number]) for number in range(len(articles)))
    return Graph(tuple(articles), tuple(targets), into, by_name)


@functools.cache
def read(name: str) -> Graph:
    """Returns the graph of "foldoc", of "manpages" or of a file of JSON lines.

    Raises:
        config.InputError: it is not there or is malformed.
    """
    if name == "foldoc":
        return link(_read_foldoc(FOLDOC))
    if name == "manpages":
        return link([Article(*page) for page in manuals.read()])
    path = pathlib.Path(name)
    if path.suffix != ".jsonl" or not path.is_file():
        raise config.InputError(
            f"The collection must be foldoc, manpages or a file .jsonl that is there, "
            f"got {name!r}."
        )
    text = path.read_text(encoding="utf-8").removesuffix("\n")
    lines = text.split("\n") if text else []  # not at U+2028, as splitlines
    return link([_of_record(line, f"{path}:{i}") for i, line in enumerate(lines, 1)])


def places(name: str) -> tuple[pathlib.Path, ...]:
    """Returns the files or folders of this machine in which a collection stands."""
    own = {"foldoc": FOLDOC.parent, "manpages": manuals.PLACE}
    return (own.get(name) or pathlib.Path(name).resolve(),)


def _of_record(line: str, place: str) -> Article:
    try:
        record: Any = json.loads(line)
        others, tags = record.get("names", []), record.get("tags", [])
        article = Article((record["title"], *others), (*tags,), record["text"])
        words = *article.names, *article.tags, article.text
        are_lists = isinstance(others, list) and isinstance(tags, list)
        if (
            are_lists
            and all(isinstance(x, str) for x in words)
            and article.title.strip()
        ):
            return article
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # told below
    raise config.InputError(
        f"{place}: a line must be an object with the strings title and text, and "
        f"perhaps the lists of strings names and tags."
    )


def _read_foldoc(stem: pathlib.Path) -> list[Article]:
    """Returns the articles of a dictionary in dictd's form.

    Its index has a line for each name, "NAME, OFFSET, SIZE" with tabs, where numbers
    are in base 64; names of one article have one offset.
    """
    index, content = stem.with_suffix(".index"), stem.with_suffix(".dict.dz")
    if not index.is_file() or not content.is_file():
        raise config.InputError(
            f"FOLDOC is not installed ({index}): apt-get install dict-foldoc."
        )
    data = gzip.decompress(content.read_bytes())
    names: dict[tuple[int, int], list[str]] = collections.defaultdict(list)
    for line in index.read_text(encoding="utf-8").splitlines():
        name, offset, size = line.split("\t")[:3]
        if not name.startswith("00"):  # facts about the dictionary
            names[_number(offset), _number(size)].append(name)
    entries = sorted(names.items())
    return [
        article
        for (offset, size), known in entries
        for article in _of_entry(data[offset : offset + size].decode(), known)
    ]


def _of_entry(entry: str, known: list[str]) -> Iterator[Article]:
    """Yields the article of an entry: lines of names, an empty one, indented text."""
    head, _, body = entry.partition("\n\n")
    heads = [x.strip() for x in head.splitlines() if x.strip()]
    text = "\n".join(x.removeprefix("   ") for x in body.strip("\n").splitlines())
    if not heads or not text or max(map(len, heads)) > _MAX_NAME:
        return
    lowered = set(map(normalize, heads))
    names = heads + [x for x in known if normalize(x) not in lowered]
    tags = _TAGS.match(text)
    filed = tuple(x.strip() for x in tags[1].split(",")) if tags else ()
    yield Article(tuple(names), filed, text)


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS.index(digit)
    return value
