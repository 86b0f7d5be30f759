"""Splits a Dockerfile into its instructions, with the documents that follow them.

What begins a document is what Docker takes for it: a word `<<END`, without a blank in
it, outside quotes.
"""

import re
from collections.abc import Iterator

# Quoted texts, which are passed over, or what begins a document: its quote and its end.
_QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\."
_BEGIN = r"(?<!\S)\d*<<-?([\"']?)([A-Za-z_][\w.-]*)\1(?!\S)"
_TOKEN = re.compile(f"{_QUOTED}|{_BEGIN}")


def read(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the number of the line, the word in capitals and the rest of each.

    Raises:
        ValueError: a document has no end.
    """
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        first, line = i, lines[i].strip()
        i += 1
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\") and i < len(lines):
            more = lines[i].rstrip()
            i += 1
            if more and not more.lstrip().startswith("#"):
                line = line[:-1] + more
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word in ("RUN", "COPY", "ADD"):
            for match in documents(rest):
                body, i = _body(lines, first, i, match[2])
                is_script = word == "RUN" and match.span() == (0, len(rest.rstrip()))
                end = [] if is_script else [match[2]]
                rest = "\n".join([*([] if is_script else [rest]), *body, *end])
        yield first + 1, word, rest


def documents(line: str) -> list[re.Match[str]]:
    """Returns what begins documents in a line: [1] is a quote or "", [2] the end."""
    return [match for match in _TOKEN.finditer(line) if match[2]]


def _body(lines: list[str], first: int, i: int, end: str) -> tuple[list[str], int]:
    """Returns the lines of a document from line i on, and the line behind its end."""
    for j in range(i, len(lines)):
        if lines[j].strip() == end:
            return lines[i:j], j + 1
    raise ValueError(
        f"Dockerfile:{first + 1}: the document's last line, {end}, is missing"
    )
