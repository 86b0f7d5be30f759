"""Statements of issues, written from what the failing tests show.

A statement tells what was expected and what happened instead. It names no file or line
of the solution and no test: a line of the log that holds a changed line is left out.
"""

import re
from collections.abc import Collection, Iterator, Mapping

from glm5_jax.environments.worlds.swe import records

_MAX_SHOWN = 3  # failures of a statement
_MAX_LINES = 12  # of a failure
_MAX_COLUMNS = 200
_A_TEST = "(a test)"  # where a log names one
_RULE = re.compile(r"^[=_-]{20,}$|^(?:_{3,}|={3,}) .* (?:_{3,}|={3,})$", re.MULTILINE)
_PROGRESS = re.compile(r"^[.FEsxX]+(?: +\[ *\d+%\])?$|^(?:FAILED|ERROR) \S+::")
_FRAME = re.compile(r'^  File "[^"]*", line \d+|^\S+\.py:\d+: in ')
_NOISE = re.compile(
    r"^Traceback|^(?:FAIL|ERROR): |^TOKEN|^E? *\+? *where |^[ ~^]*$"
    r"|^\s*#?\s*at \S+ line"
    r"|^# Looks like|^ok \d+|^1\.\.\d+|^\s+at .*\(|^node:|^Node\.js"
    r"|^\d+ (?:failed|passed|Tests)\b|^Ran \d+ tests|^FAILED \(|^FAIL$|^-+$"
    # Ruby's minitest and test-unit
    r"|^\S.*#test_.* = [\d.]+ s|^\S+#test_.*\[.*\]:$|^Run options|^# Running"
    r"|^\s+\d+\) (?:Failure|Error|Skipped):|^Finished in|^\d+ (?:runs|tests), "
    r"|^[\d.]+ (?:runs|tests)/s"
    r"|^\s+test.*:\t+[.FEPON]|^(?:Failure|Error): test.*|^Loaded suite|^Started"
    r"|^\s*\S+\.rb:\d+:in |^[\d.]+% passed|^\s+(?:=> )?\d+: |^: \([\d.]+\)$"
    r"|^[A-Z][\w:]*: $|^\S+#test_.*:$"
    # PHPUnit, JUnit, go test
    r"|^ [✔✘↩∅☢⚠] |^PHPUnit |^Runtime:|^Time: |^(?:FAILURES|ERRORS)!|^Tests: "
    r"|^/\S+\.php:\d+$|^not ok - |^ok - |^Caused by|^\t\.\.\. \d+ more"
    r"|^ *(?:---|===) (?:PASS|FAIL|SKIP|RUN|PAUSE|CONT)|^(?:ok|FAIL)\s|^exit status"
    r"|^\S.*\S \([\w\\]+\)$"
)
_FRAMED = re.compile(r"^ *[│┐├┴╵]+ ?|^\s+\w+_test\.go:\d+: ")
_UNITY = re.compile(r"^\S+\.c:\d+:\w+:FAIL:? ?")
# Of node --test, whose TAP has YAML for each test, and a count at the end.
_YAML = re.compile(
    r"^TAP version|^ *(?:---|\.\.\.)$|^ *# Subtest: |^# (?:\w+|duration_ms) [\d.]+$"
    r"|^ *(?:duration_ms|type|location|failureType|code|name|operator): | *stack: \|-$"
)
_SIGNAL = re.compile(
    r"^driver\.sh: line \d+: +\d+ (\w[\w ]*?) {2,}\(.*"
)  # of the shell
_IN_TEST = re.compile(r"([\w.-]+\.(?:rb|php|java|[cm]?[jt]s)):(\d+)")
_PLACE = re.compile(r"/work/\S*?([\w.-]+)(?=[\s:\"',)]|$)")


def write(
    repo: str,
    language: str,
    log: str,
    known_log: str,
    patch: str,
    tests: Collection[str],
    files: records.Files | None = None,
) -> str:
    """Returns the statement of an issue.

    Args:
        repo: name of the package.
        language: of the package.
        log: of the tests on the broken package.
        known_log: of the tests on the solved one; what it shows too is left out.
        patch: the solution, of which nothing is told.
        tests: names of those that fail, which are not told either.
        files: of the tests, of which the line that failed is shown. Python's logs show
            it by themselves.
    """
    secret = _changed_lines(patch)
    shown = []
    code = {path.rpartition("/")[2]: text for path, text in (files or {}).items()}
    for lines in _failures(log, known_log, code):
        told = [line for line in lines if not _tells(line, secret)][:_MAX_LINES]
        text = "\n".join(line[:_MAX_COLUMNS] for line in told).strip("\n")
        for name in sorted(tests, key=len, reverse=True):
            text = text.replace(name, _A_TEST)
        if text and text not in shown:
            shown.append(text)
    title = f"{repo} does not behave as it should"
    parts = [f"# {title}", ""]
    if shown:
        parts += ["Seen in use:", ""]
        for text in shown[:_MAX_SHOWN]:
            parts += ["```", text, "```", ""]
        if more := len(shown[_MAX_SHOWN:]):
            parts += [f"And {more} more like these.", ""]
    else:
        parts += ["A program that uses it ends without a result.", ""]
    parts.append(
        f"Find the cause in the {language} source and mend it. What works now must "
        f"keep working."
    )
    return "\n".join(parts)


def _changed_lines(patch: str) -> set[str]:
    lines = patch.splitlines()
    changed = [
        x[1:].strip() for x in lines if x[:1] in "+-" and x[:3] not in ("+++", "---")
    ]
    return {line for line in changed if len(line) > 7}


def _tells(line: str, secret: set[str]) -> bool:
    return any(part in line for part in secret)


def _failures(
    log: str, known_log: str, code: Mapping[str, bytes]
) -> Iterator[list[str]]:
    """Yields the lines of each failure that only the broken package shows."""
    known = set(known_log.splitlines())
    is_python = "Traceback (most recent call last)" in log or ".py:" in log
    for section in _RULE.split(log):
        lines = [
            line
            for line in section.splitlines()
            if line not in known and not _PROGRESS.match(line)
        ]
        if any(map(_FRAME.match, lines)):
            yield list(_of_python(lines))
        elif not is_python and (kept := list(_of_others(lines, code))):
            yield kept


def _of_python(lines: list[str]) -> Iterator[str]:
    """Yields the first frame's code, which is the test's, and the error."""
    frames = [i for i, line in enumerate(lines) if _FRAME.match(line)]
    first = frames[0]
    for line in lines[first + 1 :]:
        if _FRAME.match(line) or line.startswith("E ") or not line.startswith("    "):
            break
        if not _NOISE.match(line):
            yield ">>> " + line.strip()
    last = frames[-1]
    errors = [
        line for line in lines[last + 1 :] if re.match(r"E  |[\w.]+(?::|$)", line)
    ]
    start = lines.index(errors[0]) if errors else len(lines)
    for line in lines[start:]:
        if not _NOISE.match(line):
            yield _PLACE.sub(r"\1", re.sub(r"^E {1,3}", "", line))


def _of_others(lines: list[str], code: Mapping[str, bytes]) -> Iterator[str]:
    told = set()
    for line in lines:
        if _YAML.match(line):
            continue
        place = _IN_TEST.search(line)
        if place and place[1] in code and place[0] not in told:
            told.add(place[0])
            text = code[place[1]].decode(errors="replace").splitlines()
            yield ">>> " + "".join(text[int(place[2]) - 1 : int(place[2])]).strip()
        line = _SIGNAL.sub(r"\1", _FRAMED.sub("", line))
        if not _NOISE.match(line):
            line = _UNITY.sub("", re.sub(r"^#\s{0,3}", "", line))
            yield _PLACE.sub(r"\1", line)


def leaks(statement: str, record: records.Record) -> list[str]:
    """Returns what a statement tells of the solution or of the tests' names."""
    lines = [line for line in _changed_lines(record.patch) if line in statement]
    tests = {name for name in record.FAIL_TO_PASS if name in statement}
    return [*lines, *sorted(tests)]
