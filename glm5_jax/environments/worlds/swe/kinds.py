"""What a path of a package is: a test, a source, or a file that steers a test run."""

import fnmatch
import re
from collections.abc import Sequence

_TEST_FOLDERS = {
    *("test", "tests", "Tests", "t", "xt", "unit_tests", "unittests", "__tests__"),
    *("spec", "testdata"),
}
SIDE_FOLDERS = {
    *("example", "examples", "doc", "docs", "bench", "benchmark", "benchmarks"),
    *("fuzz", "fuzzing", "tools", "scripts", "contrib", "debian", "build", "dist"),
    *("vendor", "node_modules", "inc", "demo", "demos", "utils", "programs", "cli"),
}
ENDINGS = {
    "python": (".py",),
    "perl": (".pm", ".pl"),
    "javascript": (".js", ".cjs", ".mjs"),
    "typescript": (".ts", ".cts", ".mts", ".tsx"),
    "c": (".c", ".h"),
    "c++": (".cpp", ".cc", ".cxx", ".hpp", ".h"),
    "ruby": (".rb",),
    "php": (".php",),
    "java": (".java",),
    "go": (".go",),
}
DECLARATIONS = (".d.ts", ".d.cts", ".d.mts")  # of TypeScript; nothing of them runs
_OF_NODE = re.compile(r"(?:^|.[._-])(?:test|spec)s?\.[cm]?[jt]sx?$")
_NPM = ("*package.json", "*.node", "*node_modules/*", "*.npmrc", "*.mocharc*")
# Files that steer a run: they are put back as the package has them, new ones removed.
GUARDS = {
    "python": (
        *("*conftest.py", "*sitecustomize.py", "*usercustomize.py", "*.pth", "*.pyc"),
        *("*.so", "*pytest.ini", "setup.cfg", "tox.ini", "pyproject.toml"),
        *("unittest*", "pytest*", "_pytest*", "*canary_of_the_runner*"),
    ),
    "perl": ("*.so", "*Test/*", "*.al"),
    "javascript": _NPM,
    "typescript": (*_NPM, "*tsconfig*.json"),
    "c": ("*.o", "*.a", "*.so"),
    "c++": ("*.o", "*.a", "*.so"),
    "ruby": ("*.so", "*minitest*", "*test/unit*", "*test-unit*", "*power_assert*"),
    "php": ("*PHPUnit/*", "*phpunit*", "composer.json", "*SebastianBergmann/*"),
    "java": ("*org/junit/*", "*junit/framework/*", "*org/hamcrest/*", "*.class"),
    "go": ("*testing/*", "go.mod", "go.work", "*.s", "*.a", "*.syso"),
}


def is_test(path: str) -> bool:
    """Returns whether a file is a test, or of a folder of tests."""
    *folders, name = path.split("/")
    return (
        bool(_TEST_FOLDERS & set(folders))
        or fnmatch.fnmatch(name, "test_*.py")
        or name.endswith(("_test.py", "_tests.py", ".t", "_test.go"))
        or name in ("tests.py", "test.py")
        or _OF_NODE.search(name) is not None
    )


def is_guarded(path: str, guards: Sequence[str]) -> bool:
    """Returns whether a file steers the run: an agent's version is not taken.

    A package of Python is imported in the place of a module of its name, so that it is
    guarded as the module is.
    """
    module = re.sub(r"/__init__\.py$", ".py", path)
    return any(
        is_test(name) or any(fnmatch.fnmatch(name, guard) for guard in guards)
        for name in {path, module}
    )


def is_beside(path: str) -> bool:
    """Returns whether a file lies beside a package: in its examples, tools, copies."""
    return bool(SIDE_FOLDERS & set(path.split("/")[:-1]))
