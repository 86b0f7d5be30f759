"""Headers of Debian's patches (DEP-3, https://dep-team.pages.debian.net/deps/dep3/).

A header says what was wrong, where it was reported, and often how it was mended. The
first two make a statement; sentences that tell the third are left out.
"""

import dataclasses
import re

from glm5_jax.environments.worlds.swe import diffs, records, statements

_DIFF = re.compile(r"---|\+\+\+|diff |Index: |={3,}|@@ |GIT binary")
_FIELD = re.compile(r"([A-Z][\w-]*): *(.*)")
_FIELDS = ("Description", "Subject", "From", "Author", "Date", "Origin", "Forwarded")
_MORE_FIELDS = ("Applied-Upstream", "Last-Update", "Last-Updated", "Cc", "Reviewed")
_COMMIT = re.compile(r"From [0-9a-f]{40}|\(cherry picked from")
_PREFIX = re.compile(r"^(?:\[PATCH[^]]*\]|\[[\d/]+\])\s*")
_CVE = re.compile(r"\bCVE-\d{4}-\d{4,}\b")
# Addresses of bugs are told; those of changes have the solution.
_CHANGE = re.compile(
    r"/(?:commits?|pulls?|merge_requests|-?/?diff|compare|patch)/|\.patch"
)
_HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
# Words of who tells what was done, not what was wrong.
_DONE = re.compile(
    r"^(?:also |now |then |we |it )*(?:add|use|replac|switch|check|remov|chang|call|"
    r"mov|set|limit|wrap|cast|convert|initiali[sz]|renam|delet|drop|skip|return|import|"
    r"backport|cherry|pass|mak|do not|don't|increas|decreas|reject|ensur|restrict|"
    r"validat|introduc|rewrit|rework|port|updat|patch|test|"
    r"enhanc|extend|harden|escap|filter|saniti[sz]|thank)\w*\b"
    r"|\bby \w+ing\b|\binstead\b|\bthis (?:pr|patch|commit|change|fix)\b"
    r"|\brather than\b|\badd(?:s|ed|ing)? tests?\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"\w*(?:_\w|[a-z][A-Z])\w*|\b\w+(?=\(\))|(?<=`)[^`]+(?=`)")
_BREAK = re.compile(r"(?<=[.!?:]) +(?=[A-Z`'\"(])|(?:^| +)[*-] +")  # of sentences


@dataclasses.dataclass(frozen=True)
class Header:
    """What a patch says of itself."""

    paragraphs: tuple[tuple[str, ...], ...]  # of sentences; the first is the synopsis
    bugs: tuple[str, ...]  # addresses, and numbers of CVE


def read(patch: str, name: str = "") -> Header:
    """Returns the header of a patch.

    Args:
        patch: its text.
        name: of its file, which may name a CVE.
    """
    fields: dict[str, list[str]] = {"Description": []}
    current = "Description"
    head = []
    for line in patch.splitlines():
        if _DIFF.match(line):
            break
        line = re.sub(r"^#+ ?(?:DP: ?)?", "", line)
        head.append(line)
        if _COMMIT.match(line):
            continue
        match = _FIELD.fullmatch(line)
        if match and _is_field(match[1]):
            current = match[1]
            fields.setdefault(current, []).append(match[2].strip())
        elif line[:1] in (" ", "\t"):
            text = line.strip()
            fields[current].append("" if text == "." else text)
        else:  # text without a field, after one that has ended
            current = "Description"
            fields[current].append(line.strip())
    bugs = [
        bug
        for key, values in fields.items()
        if key.startswith("Bug")
        for bug in " ".join(values).split()
        if not _CHANGE.search(bug)
    ]
    bugs += _CVE.findall(" ".join([*head, name]))
    lines = fields["Description"]
    if subject := " ".join(fields.get("Subject", [])).strip():
        lines = [_PREFIX.sub("", subject), "", *lines]
    return Header(_paragraphs(lines), tuple(dict.fromkeys(bugs)))


def _is_field(name: str) -> bool:
    known = name in (*_FIELDS, *_MORE_FIELDS)
    return known or name.startswith("Bug") or name.endswith(("-by", "-By"))


def _paragraphs(lines: list[str]) -> tuple[tuple[str, ...], ...]:
    """Returns the sentences of the first line, and of what is between empty lines."""
    first, *rest = "\n".join(lines).strip().split("\n")
    parts = [first, *re.split(r"\n\s*\n", "\n".join(rest))]
    split = [_BREAK.split(" ".join(part.split())) for part in parts]
    return tuple(kept for found in split if (kept := tuple(filter(None, found))))


def statement(record: records.Record, header: Header, patch: str) -> str:
    """Returns the statement of a task with what a header tells of the bug.

    Args:
        record: the task, whose statement shows what fails.
        header: of its patch.
        patch: whole, with changes of tests.
    """
    told = _Told(record, patch)
    title, _, rest = record.problem_statement.partition("\n")
    kept = [[x for x in some if told.is_harmless(x)] for some in header.paragraphs]
    if header.paragraphs and kept[0][:1] == [header.paragraphs[0][0]]:
        title = f"# {record.repo}: {kept[0].pop(0)}"
    parts = [" ".join(sentences) for sentences in kept if sentences]
    if bugs := [bug for bug in header.bugs if told.is_harmless(bug)]:
        parts.append(f"Reported as {', '.join(bugs)}.")
    return "\n".join([title, *(f"\n{text}" for text in parts), rest])


class _Told:
    """Judges sentences: does one give the solution away?"""

    def __init__(self, record: records.Record, patch: str) -> None:
        self._record, self._patch = record, patch
        paths = {path for path in diffs.parse(patch) if path}
        self._names = paths | {path.rpartition("/")[2] for path in paths}
        old, new = "", ""
        for _, hunks in diffs.parse(record.patch).values():
            for hunk in hunks:
                old, new = old + "".join(hunk.old), new + "".join(hunk.new)
        self._new_words = set(re.findall(r"\w+", new)) - set(re.findall(r"\w+", old))

    def is_harmless(self, text: str) -> bool:
        """Returns whether a sentence tells neither a change nor a test."""
        if not text or _DONE.search(text) or _HASH.search(text) or _CHANGE.search(text):
            return False
        if any(name in text for name in self._names):
            return False
        words = {w for code in _CODE.findall(text) for w in re.findall(r"\w+", code)}
        if words & self._new_words:
            return False
        tests = {name.rpartition("::")[2] for name in self._record.FAIL_TO_PASS}
        leaked = statements.leaks(text, self._record)
        return not leaked and not any(len(n) > 7 and n in text for n in tests)
