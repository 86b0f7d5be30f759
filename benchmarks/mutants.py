"""Breaks the code in one place at a time and counts what the default tests notice.

    python benchmarks/mutants.py --seed=1 --count=100 --out=DIR [--limit=300] [TEST ...]

Clones the checkout's commit into DIR/tree and works there. Runs every file of tests (or
those of the folders and files TEST) once under the package `coverage`, which tells the
lines that each test executes. Then draws single edits (an operator, a constant, a
condition, a dropped call) from the files of mutations.SOURCES, each file as often as it
has lines. A mutant meets the tests that execute its statement, at first those whose
paths share words with its file, the quick ones before the slow ones; then the files of
those tests whole, until one fails. A mutant that no test fails within --limit seconds
of CPU time counts as a survivor, as does one that runs in child processes of tests
only.

Every verdict is a line of DIR/verdicts.jsonl. The same command resumes; a larger
--limit or more files of tests continue with the survivors, which are printed as diffs.
Seed 1, at d8547f2, took 19 minutes of CPU time for the first pass over 90 files of
tests, and 17 for the verdicts with --limit=60: half of the killed mutants took less
than 5 seconds each.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import coverage
import mutations
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
IGNORED = ("architecture_test.py",)  # it sees style alone
STARTUP = 4.0  # seconds of CPU until pytest runs the first test
# Seconds of tests that one process runs; the next one runs twice as many.
FIRST_BATCH = 10.0
HANG = (60, 10)  # seconds, and how many times as long as expected
# The environment variable that names the plugin's file.
SECONDS_FILE = "MUTANTS_SECONDS"
_REPORTED: list[float] = []  # seconds of CPU at the reports of the first pass


@dataclasses.dataclass(frozen=True)
class Job:
    """Tests that one process runs, and the seconds that they take without a mutant."""

    tests: tuple[str, ...]
    seconds: float


def main() -> None:
    """Draws, tests, and prints the survivors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("tests", nargs="*", default=["tests"])
    args = parser.parse_args()
    out = args.out.resolve()
    tree = _clone(out)
    _measure(out, tree, args.tests)
    mutants = list(mutations.draw(tree, args.seed, args.count))
    for number, mutant in enumerate(mutants):
        before = _verdicts(out).get(number, {})
        verdict = _judge(out, tree, mutant, before, args.limit)
        verdict = {"number": number, **verdict}
        if verdict == before:
            continue
        with (out / "verdicts.jsonl").open("a") as file:
            file.write(json.dumps(verdict) + "\n")
        shown = {k: v for k, v in verdict.items() if k != "passed"}
        print(json.dumps(shown), flush=True)
    verdicts = _verdicts(out)
    survivors = [n for n, v in sorted(verdicts.items()) if not v["killed_by"]]
    for number in survivors:
        print(f"\nsurvivor {number}:\n{_diff(tree, mutants[number])}")
    print(f"killed {len(verdicts) - len(survivors)} of {len(verdicts)}")


# What the tests execute, and how long they take


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes the seconds of CPU of a test's part, as a plugin of the first pass."""
    seconds = pathlib.Path(os.environ[SECONDS_FILE])
    now = sum(os.times()[:4])
    line = [report.nodeid, now - _REPORTED[-1], report.outcome]
    _REPORTED.append(now)
    with seconds.open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Names the test to `coverage`, as a plugin of the first pass."""
    _REPORTED.append(sum(os.times()[:4]))
    coverage.Coverage.current().switch_context(item.nodeid)


def _measure(out: pathlib.Path, tree: pathlib.Path, names: list[str]) -> None:
    """Runs each file of tests once under coverage."""
    plugin = out / "plugin"
    plugin.mkdir(exist_ok=True)
    for file in (__file__, mutations.__file__):
        shutil.copy(file, plugin)
    (out / "coverage").mkdir(exist_ok=True)
    paths = [tree / name for name in names]
    tests = [t for p in paths for t in (sorted(p.rglob("*_test.py")) or [p])]
    for test in tests:
        name = test.relative_to(tree).as_posix()
        data = out / "coverage" / f"{name.replace('/', '+')}.db"
        seconds, result = data.with_suffix(".lines"), data.with_suffix(".json")
        if test.name in IGNORED or result.exists():
            continue
        data.unlink(missing_ok=True)
        seconds.unlink(missing_ok=True)
        packages = "--source=glm5_jax,pallas_kernels"
        command = ["-m", "coverage", "run", f"--data-file={data}", packages]
        command += ["-m", "pytest", "-q", "-p", "mutants", name]
        environ = {"PYTHONPATH": f"{tree}:{plugin}", SECONDS_FILE: str(seconds)}
        _, used, last = _python(tree, command, None, environ)
        taken: dict[str, float] = {}
        lines = seconds.read_text().splitlines() if seconds.exists() else []
        for test_id, duration, outcome in map(json.loads, lines):
            failed = outcome == "failed"
            taken[test_id] = taken.get(test_id, 0) + (math.inf if failed else duration)
        result.write_text(json.dumps({"name": name, "tests": taken, "cpu": used}))
        print(f"{name}: {used:.0f} s, {len(taken)} tests, {last}", flush=True)


@dataclasses.dataclass(frozen=True)
class Executed:
    """The tests that execute a file."""

    seconds: dict[str, float]
    lines: dict[str, set[int]]  # of each test; of a file of tests when it is imported
    failing: tuple[str, ...]  # without any mutant


@functools.cache
def _executed(out: pathlib.Path, file: str) -> Executed:
    seconds, lines, failing = {}, {}, []
    for path in sorted((out / "coverage").glob("*.json")):
        result = json.loads(path.read_text())
        if not path.with_suffix(".db").exists():
            continue
        data = coverage.CoverageData(str(path.with_suffix(".db")))
        data.read()
        taken = {t: s for t, s in result["tests"].items() if s < math.inf}
        failing += sorted(result["tests"].keys() - taken)
        seconds |= taken | {result["name"]: sum(taken.values())}
        for line, contexts in data.contexts_by_lineno(str(out / "tree" / file)).items():
            for context in contexts:
                lines.setdefault(context or result["name"], set()).add(line)
    lines = {test: seen for test, seen in lines.items() if test in seconds}
    return Executed(seconds, lines, tuple(failing))


# Judging


def _queue(executed: Executed, mutant: mutations.Mutant, passed: set[str]) -> list[str]:
    """Returns the tests that execute the statement, then whole files of tests.

    Tests whose path shares most words with the mutant's come first, quick ones before
    slow ones. Lines that run at import alone are for all tests that execute the file.
    """
    seconds = executed.seconds
    span = set(mutant.statement)
    sees = {test for test, seen in executed.lines.items() if span & seen}
    tests = {t for t in sees if "::" in t}
    if not tests and sees:
        tests = {t for t in executed.lines if "::" in t}
    files = {t.split("::")[0] for t in tests | sees} - passed
    others = {t.split("::")[0] for t in seconds.keys() - tests if "::" in t}
    words = _words(mutant.file)

    def rank(test: str) -> tuple:
        return -len(words & _words(test.split("::")[0])), seconds[test]

    tests = {t for t in tests - passed if t.split("::")[0] in files}
    return sorted(tests, key=rank) + sorted(files & others, key=seconds.get)


def _words(path: str) -> set[str]:
    return set(re.split(r"\W|_", path.removesuffix("_test.py").removesuffix(".py")))


def _next(queue: list[str], seconds: dict[str, float], size: float, most: float) -> Job:
    """Returns the first tests of the queue that take `size`, at most `most` seconds."""
    tests, total = [], 0.0
    for test in queue:
        if total < size and total + seconds[test] <= most:
            tests.append(test)
            total += seconds[test]
    return Job(tuple(tests), total + STARTUP)


def _judge(
    out: pathlib.Path,
    tree: pathlib.Path,
    mutant: mutations.Mutant,
    before: dict,
    limit: float,
) -> dict:
    """Runs tests until one fails or the time is spent; `before` is the last verdict."""
    passed, used = list(before.get("passed", [])), before.get("cpu", 0.0)
    killer, is_cut = before.get("killed_by"), before.get("is_cut", False)
    if killer is None:
        executed = _executed(out, mutant.file)
        queue, size = _queue(executed, mutant, set(passed)), FIRST_BATCH
        skipped = [f"--deselect={t}" for t in executed.failing]
        path = tree / mutant.file
        original = path.read_text()
        path.write_text(mutant.source)
        try:
            while queue and killer is None:
                left = limit - used - STARTUP
                job = _next(queue, executed.seconds, size, left)
                if not job.tests:
                    break
                command = ["-m", "pytest", "-q", "-x", "--tb=line", "-rfE"]
                wall = HANG[0] + HANG[1] * job.seconds
                command += [*skipped, *job.tests]
                status, seconds, last = _python(tree, command, wall, {})
                used += seconds
                if status not in (0, 5):
                    killer = last
                    break
                passed += job.tests
                queue = [test for test in queue if test not in job.tests]
                size *= 2
        finally:
            path.write_text(original)
        is_cut = killer is None and bool(queue)
    return {
        "file": mutant.file,
        "line": mutant.line,
        "what": mutant.what,
        "killed_by": killer,
        "is_cut": is_cut,
        "cpu": round(used, 1),
        "passed": passed,
    }


def _python(
    tree: pathlib.Path, arguments: list[str], limit: float | None, environ: dict
) -> tuple[int, float, str]:
    """Runs Python in the clone: its status, seconds of CPU and failed test."""
    environ = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | environ
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        lines = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))]
        last = (lines or output.splitlines() or ["no output"])[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        last = f"timeout after {time.monotonic() - began:.0f} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return process.returncode, used, last[:300]


def _clone(out: pathlib.Path) -> pathlib.Path:
    """Returns the clone of the checkout's commit, without an earlier run's mutant."""
    tree = out / "tree"
    if not tree.exists():
        out.mkdir(parents=True, exist_ok=True)
        command = ["git", "clone", "--quiet", str(ROOT), str(tree)]
        subprocess.run(command, check=True)
    subprocess.run(["git", "checkout", "--quiet", "."], cwd=tree, check=True)
    return tree


def _verdicts(out: pathlib.Path) -> dict[int, dict]:
    """Returns the last verdict of every mutant."""
    path = out / "verdicts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {v["number"]: v for v in map(json.loads, lines)}


def _diff(tree: pathlib.Path, mutant: mutations.Mutant) -> str:
    """Returns the edit with a few lines around it."""
    texts = (tree / mutant.file).read_text(), mutant.source
    lines = (text.splitlines() for text in texts)
    shown = difflib.unified_diff(*lines, mutant.file, mutant.file, lineterm="", n=2)
    return "\n".join(shown)


if __name__ == "__main__":
    main()
