"""Runs a Python package's tests in the sandbox, and catches runners that are patched.

`python -s guarded_run.py pytest|unittest TOKEN_FILE TOOLS ROOTS FILE...`. It stands
alone: the sandbox has the standard library, and pytest in the folder TOOLS. Each line
of its log begins with the token of the token file, which is removed before the package
is imported. The last line, `TOKEN DONE`, is missing if the process ends early. `TOKEN
TAMPERED NAME` says that the package changed the code of the runner.
"""

import contextlib
import importlib
import io
import os
import pathlib
import subprocess
import sys
import types
import unittest
import unittest.mock
from collections.abc import Callable
from typing import Any

_WATCHED = ("unittest", "_pytest", "pytest", "pluggy", "builtins")
_CANARY = """
import unittest

class canary_of_the_runner(unittest.TestCase):
    def test_that_must_fail(self):
        self.assertEqual(1, 2)
"""


def main(kind: str, token_file: str, tools: str, roots: str, *files: str) -> None:
    """Runs the tests and reports them on the standard output."""
    token = pathlib.Path(token_file).read_text(encoding="utf-8").strip()
    os.unlink(token_file)
    _set_up(pathlib.Path(token_file).with_name("setup.sh"), files)
    output, stamp = os.fdopen(os.dup(1), "w", buffering=1), os.getpid()

    def report(line: str) -> None:
        if os.getpid() == stamp:  # not in a process that a test started
            output.write(f"{token} {line}\n")

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.argv = [kind]
    canary = pathlib.Path(token_file).with_name("canary_of_the_runner_test.py")
    canary.write_text(_CANARY, encoding="utf-8")
    run = _run_pytest if kind == "pytest" else _run_unittest
    if kind == "pytest":
        sys.path.append(tools)
        import _pytest.config

        for plugin in _pytest.config.default_plugins:
            importlib.import_module(f"_pytest.{plugin}")
    before = _codes()
    sys.path[:0] = [os.path.abspath(root) for root in roots.split(":")]
    with contextlib.suppress(SystemExit):
        run([*files, str(canary)], report)
    after = _codes()
    for name in sorted(name for name in before if before[name] is not after.get(name)):
        report(f"TAMPERED {name}")
    with contextlib.suppress(Exception):  # a package may have replaced it
        sys.stdout.flush()
    report("DONE")
    output.flush()
    os._exit(0)


def _set_up(script: pathlib.Path, files: tuple[str, ...]) -> None:
    """Runs what a recipe wants before the tests; ends if that fails or changes them."""
    if not script.exists():
        return
    before = [pathlib.Path(file).read_bytes() for file in files]
    done = subprocess.run(
        ["bash", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    after = [pathlib.Path(file).read_bytes() for file in files]
    if done.returncode or before != after:
        sys.stdout.buffer.write(done.stdout)
        sys.exit(1)


def _codes() -> dict[str, Any]:
    """Returns the code of each function of the runner's modules, by its name."""
    codes = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in _WATCHED or module_name == "pytest":
            continue
        for name, value in list(vars(module).items()):
            owner = f"{module_name}.{name}"
            if module_name == "builtins":
                codes[owner] = value
            elif isinstance(value, types.FunctionType):
                codes[owner] = value.__code__
            elif isinstance(value, type) and value.__module__ == module_name:
                for key, method in list(vars(value).items()):
                    if isinstance(method, types.FunctionType):
                        codes[f"{owner}.{key}"] = method.__code__
    codes.pop("builtins._", None)  # an interpreter's last value
    return codes


def _run_pytest(files: list[str], report: Callable[[str], None]) -> None:
    import pytest

    class Plugin:
        def __init__(self) -> None:
            self.outcomes = {}

        def pytest_runtest_logreport(self, report: Any) -> None:
            known = self.outcomes.get(report.nodeid)
            if report.failed:
                self.outcomes[report.nodeid] = "FAILED"
            elif report.when == "call" or (report.skipped and known is None):
                self.outcomes[report.nodeid] = report.outcome.upper()

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed and "canary_of" not in report.nodeid:
                self.outcomes[report.nodeid] = "ERROR"

    plugin, home = Plugin(), pathlib.Path.cwd().name + "/"
    options = ["-q", "-x", "--maxfail=1000", "-p", "no:cacheprovider", "-o", "addopts="]
    options += [
        "--rootdir=..",
        "--tb=short",
        "--continue-on-collection-errors",
        "-o",
        "filterwarnings=",
        "-W",
        "ignore",
    ]
    pytest.main([*options, *files], plugins=[plugin])
    sys.stdout.write("\n")  # the log's last line may lack its end
    for name, outcome in plugin.outcomes.items():
        report(f"{outcome} {_one_line(name).removeprefix(home)}")


def _one_line(name: str) -> str:
    return name.encode("unicode_escape").decode("ascii")


def _run_unittest(files: list[str], report: Callable[[str], None]) -> None:
    suite = unittest.TestSuite()
    for file in files:
        path = pathlib.Path(file).resolve()
        parts, folder = [path.stem], path.parent
        while (folder / "__init__.py").exists():
            parts.insert(0, folder.name)
            folder = folder.parent
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        suite.addTest(unittest.defaultTestLoader.loadTestsFromName(".".join(parts)))

    class Result(unittest.TextTestResult):
        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            bad = {id(t) for t, _ in [*self.failures, *self.errors]}
            bad |= {
                id(t.test_case) for t, _ in self.failures if hasattr(t, "test_case")
            }
            bad |= {id(t.test_case) for t, _ in self.errors if hasattr(t, "test_case")}
            bad |= {id(t) for t in self.unexpectedSuccesses}
            is_skipped = any(test is skipped for skipped, _ in self.skipped)
            word = "FAIL" if id(test) in bad else "skipped" if is_skipped else "ok"
            method = test.id().rpartition(".")[2]
            report(f"{method} ({test.id()}) ... {word}")

    stream = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), write_through=True)
    runner: Any = unittest.TextTestRunner
    runner(stream, resultclass=Result, verbosity=0).run(suite)


if __name__ == "__main__":
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # nobody's package
    main(*sys.argv[1:])
