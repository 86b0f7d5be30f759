"""Unified diffs of folders of files, as git and patch write and read them."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping

from glm5_jax import config

_NO_NEWLINE = "\\ No newline at end of file\n"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ABSENT = "/dev/null"


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Neighbouring lines that a patch replaces."""

    start: int  # index of the first line in the old file
    old: tuple[str, ...]  # lines with their ends
    new: tuple[str, ...]


def make(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> str:
    """Returns the unified diff that turns some files into others.

    Files that are not text in UTF-8 are left out.
    """
    return "".join(
        "".join(_file_diff(path, old.get(path), new.get(path)))
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    )


def _file_diff(path: str, old: bytes | None, new: bytes | None) -> Iterator[str]:
    try:
        before, after = (lines_of((x or b"").decode()) for x in (old, new))
    except UnicodeDecodeError:
        return
    yield f"diff --git a/{path} b/{path}\n"
    if old is None or new is None:
        yield ("new" if old is None else "deleted") + " file mode 100644\n"
    names = (
        _ABSENT if old is None else f"a/{path}",
        _ABSENT if new is None else f"b/{path}",
    )
    for line in difflib.unified_diff(before, after, *names):
        yield line if line.endswith("\n") else line + "\n" + _NO_NEWLINE


def lines_of(text: str) -> list[str]:
    """Returns lines with their ends, which are line feeds alone."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def parse(patch: str) -> dict[str, tuple[str | None, list[Hunk]]]:
    """Returns the hunks of every old path, and the new path (None: deleted).

    A new file is found by its new path.

    Raises:
        config.InputError: the text is no unified diff.
    """
    files: dict[str, tuple[str | None, list[Hunk]]] = {}
    lines = lines_of(patch)
    old_path, hunks, i = "", [], 0
    while i < len(lines):
        line = lines[i]
        if line.startswith("--- ") and "".join(lines[i + 1 : i + 2])[:4] == "+++ ":
            old_path, new_path = _path(line), _path(lines[i + 1])
            hunks = []
            files[new_path if old_path == _ABSENT else old_path] = (
                None if new_path == _ABSENT else new_path,
                hunks,
            )
            i += 2
        elif match := _HUNK.match(line):
            if not old_path:
                raise config.InputError("a patch has a hunk before any '--- PATH'.")
            hunk, i = _read_hunk(lines, i + 1, match)
            hunks.append(hunk)
        else:
            i += 1
    return files


def _path(line: str) -> str:
    name = line[4:].rstrip("\n").split("\t")[0]
    return name if name == _ABSENT else name.split("/", 1)[-1]


def _read_hunk(lines: list[str], i: int, match: re.Match[str]) -> tuple[Hunk, int]:
    num_old, num_new = (int(match[k] or 1) for k in (2, 4))
    old: list[str] = []
    new: list[str] = []
    while i < len(lines):
        kind, rest = lines[i][:1], lines[i][1:]
        if kind == "\\":  # the line before has no end
            for side, before in ((old, lines[i - 1][:1]), (new, lines[i - 1][:1])):
                if before == " " or before == ("-" if side is old else "+"):
                    side[-1] = side[-1].removesuffix("\n")
        elif len(old) == num_old and len(new) == num_new:
            break
        elif kind in " -+\n":
            rest = rest if kind != "\n" else "\n"  # mailers strip the blank
            if kind != "+":
                old.append(rest)
            if kind != "-":
                new.append(rest)
        else:
            break
        i += 1
    if (len(old), len(new)) != (num_old, num_new):
        raise config.InputError(
            f"a hunk of a patch, {match[0]!r}, has {len(old)} old and {len(new)} new "
            f"lines; give the patch whole."
        )
    start = int(match[1])
    return Hunk(max(start - 1, 0) if num_old else start, tuple(old), tuple(new)), i


def apply(patch: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns files with a patch applied.

    Raises:
        config.InputError: a hunk does not fit at its line, or nowhere else alone.
    """
    result = dict(files)
    for old_path, (new_path, hunks) in parse(patch).items():
        lines = lines_of(result.pop(old_path, b"").decode())
        shift = 0
        for hunk in hunks:
            at = _find(lines, hunk, shift, old_path)
            lines[at : at + len(hunk.old)] = hunk.new
            shift += len(hunk.new) - len(hunk.old) + at - (hunk.start + shift)
        if new_path is not None:
            result[new_path] = "".join(lines).encode()
    return result


def _find(lines: list[str], hunk: Hunk, shift: int, path: str) -> int:
    size, at = len(hunk.old), hunk.start + shift
    if tuple(lines[at : at + size]) == hunk.old:
        return at
    fits = [i for i in range(len(lines)) if tuple(lines[i : i + size]) == hunk.old]
    if size and len(fits) == 1:
        return fits[0]
    raise config.InputError(
        f"the patch does not fit {path} at line {hunk.start + 1}; it was made for "
        f"other files."
    )
