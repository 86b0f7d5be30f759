"""Logs of test runs, read by rules: each parser returns the outcome of every test.

An outcome is "passed", "failed" or "skipped". A test that occurs twice has failed if
one of them failed. `read_run` reads the log of a whole run; a run counts only if its
end came and the canary, a test that must fail, failed.
"""

import re
from collections.abc import Callable, Iterator, Mapping

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
NO_FAILURE = "a test that must fail did not"  # a problem of a run
CANARY = "canary_of_the_runner"  # in the names of tests that must fail
Outcomes = Mapping[str, str]

_PYTEST = {
    "PASSED": PASSED,
    "XFAIL": PASSED,
    "FAILED": FAILED,
    "ERROR": FAILED,
    "XPASS": FAILED,
    "SKIPPED": SKIPPED,
}
_PYTEST_SHORT = re.compile(rf"({'|'.join(_PYTEST)}) (\S+\.py(?:::.*?)?)(?: - .*)?$")
_PYTEST_LONG = re.compile(rf"(\S+\.py::.*?) ({'|'.join(_PYTEST)})\b")
_UNITTEST = re.compile(
    r"(\w+) \(([\w.]+)\)(?:\n[^\n]*?)?? \.\.\. "
    r"(?:[^\n]*?)(ok|FAIL|ERROR|skipped|expected failure|unexpected success)\b"
)
_UNITTEST_OUTCOMES = {
    "ok": PASSED,
    "expected failure": PASSED,
    "skipped": SKIPPED,
}
_TAP = re.compile(r"( *)(not )?ok\b(?: (\d+))?(?: -)? ?([^#\n]*)(?:# *(\w+))?")
_TAP_SUBTEST = re.compile(r"( *)# Subtest: (.*)")
_UNITY = re.compile(r"(\S+\.c):\d+:(\w+):(PASS|FAIL|IGNORE)")
_UNITY_OUTCOMES = {"PASS": PASSED, "FAIL": FAILED, "IGNORE": SKIPPED}
# Of minitest, "Name#test_x = 0.00 s = .", and of test-unit, which has a line for each
# class, and "  test_x:   .: (0.000045)" below it.
_MINITEST = re.compile(r"(\S.*#test_.*) = [\d.]+ s = ([.FES])")
_TEST_UNIT = re.compile(r" *(?:(test[^\t]*):\t+([.FEPON])|([A-Z][\w:]*): *$)")
_RUBY_OUTCOMES = {".": PASSED, "S": SKIPPED, "P": SKIPPED, "O": SKIPPED, "N": SKIPPED}
_TESTDOX = re.compile(r" ([✔✘↩∅☢⚠]) (.*?)(?: \[[\d.]+ ms\])?")
_TESTDOX_OUTCOMES = {"✔": PASSED, "↩": SKIPPED, "∅": SKIPPED}
_GO = re.compile(r" *--- (PASS|FAIL|SKIP): (\S+)")
_CARGO = re.compile(r"test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)")


def parse_pytest(log: str) -> Outcomes:
    """Returns the outcomes in the output of `pytest -v` or `pytest -rA`."""

    def found() -> Iterator[tuple[str, str]]:
        for line in log.splitlines():
            if match := _PYTEST_SHORT.match(line):
                yield match[2], _PYTEST[match[1]]
            elif match := _PYTEST_LONG.match(line):
                yield match[1], _PYTEST[match[2]]

    return _joined(found())


def parse_unittest(log: str) -> Outcomes:
    """Returns the outcomes in the output of `python -m unittest -v`."""
    return _joined(
        (
            match[2] if match[2].endswith(f".{match[1]}") else f"{match[2]}.{match[1]}",
            _UNITTEST_OUTCOMES.get(match[3], FAILED),
        )
        for match in _UNITTEST.finditer(log)
    )


def parse_tap(log: str) -> Outcomes:
    """Returns the outcomes of the Test Anything Protocol (Perl, tape, node --test).

    The name of a test has its number, or, below `# Subtest:`, the names of the tests
    that it is in. A test to do counts as skipped.
    """

    def found() -> Iterator[tuple[str, str]]:
        above: dict[int, str] = {}
        for line in log.splitlines():
            if match := _TAP_SUBTEST.fullmatch(line):
                above = {k: v for k, v in above.items() if k < len(match[1])}
                above[len(match[1])] = match[2]
            elif match := _TAP.match(line):
                indent, text = len(match[1]), match[4].strip()
                path = [name for depth, name in above.items() if depth < indent]
                name = text if above else f"{match[3] or ''} {text}".strip()
                is_skipped = (match[5] or "").upper() in ("SKIP", "TODO")
                outcome = FAILED if match[2] else PASSED
                yield " > ".join([*path, name]), SKIPPED if is_skipped else outcome

    return _joined(found())


def parse_unity(log: str) -> Outcomes:
    """Returns the outcomes of the C test framework Unity."""
    return _joined(
        (match[2], _UNITY_OUTCOMES[match[3]]) for match in _UNITY.finditer(log)
    )


def parse_ruby(log: str) -> Outcomes:
    """Returns the outcomes of minitest and test-unit, both with -v."""

    def found() -> Iterator[tuple[str, str]]:
        group = ""
        for line in log.splitlines():
            if match := _MINITEST.fullmatch(line):
                yield match[1], _RUBY_OUTCOMES.get(match[2], FAILED)
            elif match := _TEST_UNIT.match(line):
                group = match[3] or group
                if match[1]:
                    outcome = _RUBY_OUTCOMES.get(match[2], FAILED)
                    yield f"{group}#{match[1]}", outcome

    return _joined(found())


def parse_testdox(log: str) -> Outcomes:
    """Returns the outcomes of `phpunit --testdox`."""

    def found() -> Iterator[tuple[str, str]]:
        group = ""
        for line in log.splitlines():
            if match := _TESTDOX.fullmatch(line):
                outcome = _TESTDOX_OUTCOMES.get(match[1], FAILED)
                yield f"{group}: {match[2]}", outcome
            elif line and line[0] != " ":
                group = line

    return _joined(found())


def parse_go(log: str) -> Outcomes:
    """Returns the outcomes in the output of `go test -v`."""
    kinds = {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}
    return _joined((m[2], kinds[m[1]]) for m in map(_GO.match, log.splitlines()) if m)


def parse_cargo(log: str) -> Outcomes:
    """Returns the outcomes in the output of `cargo test`."""
    kinds = {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED}
    matches = map(_CARGO.match, log.splitlines())
    return _joined((m[1], kinds[m[2]]) for m in matches if m)


def parse_exit(log: str) -> Outcomes:
    """Returns nothing: a program without a known log has its exit code alone."""
    del log
    return {}


PARSERS: Mapping[str, Callable[[str], Outcomes]] = {
    "pytest": parse_pytest,
    "unittest": parse_unittest,
    "tap": parse_tap,
    "unity": parse_unity,
    "ruby": parse_ruby,
    "testdox": parse_testdox,
    "go": parse_go,
    "cargo": parse_cargo,
    "exit": parse_exit,
}


def read_run(
    log: str, token: str, parser: str, *, is_guarded: bool
) -> tuple[dict[str, str], str]:
    """Returns the outcomes of a run, and what is wrong with it, "" if it is whole.

    Args:
        log: of the driver.
        token: that begins the lines of the driver.
        parser: one of PARSERS.
        is_guarded: whether guarded_run.py ran the tests, which marks each line.
    """
    read = PARSERS[parser]
    if is_guarded:
        lines = re.findall(rf"{token} (.*)", log)
        outcomes = dict(read("\n".join(lines)))
        if tampered := [line for line in lines if line.startswith("TAMPERED")]:
            return outcomes, f"the test runner was changed: {tampered[0].split()[1]}"
        is_done = lines[-1:] == ["DONE"]
    else:
        outcomes = dict(_read_sections(log, token, read))
        is_done = f"{token} DONE" in log
    canaries = [name for name in outcomes if CANARY in name]
    if not is_done or not canaries:
        return outcomes, "the run ended early"
    is_caught = any(outcomes[name] == FAILED for name in canaries)
    for name in canaries:
        del outcomes[name]
    return outcomes, "" if is_caught else NO_FAILURE


def _read_sections(
    log: str, token: str, read: Callable[[str], Outcomes]
) -> Iterator[tuple[str, str]]:
    for section in log.split(f"{token} FILE ")[1:]:
        file, _, rest = section.partition("\n")
        text, _, code = rest.rpartition(f"{token} EXIT ")
        is_zero = code.split()[:1] == ["0"]
        yield file, PASSED if is_zero else FAILED
        for name, outcome in read(text).items():
            yield f"{file}::{name}", outcome


def detect(log: str) -> str:
    """Returns the parser that reads the most tests in a log, "exit" if none does."""
    counts = {name: len(parser(log)) for name, parser in PARSERS.items()}
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else "exit"


def _joined(found: Iterator[tuple[str, str]]) -> Outcomes:
    outcomes: dict[str, str] = {}
    for name, outcome in found:
        if outcomes.get(name) != FAILED:
            outcomes[name] = outcome
    return outcomes
