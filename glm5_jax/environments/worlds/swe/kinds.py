"""What a path of a package is: a test, a source, or a file that steers a test run."""

import fnmatch
import functools
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence

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
# Of C: a header of an agent would come before one of these folders, in those of -I.
_COMPILED = (
    *("*.o", "*.a", "*.so", "*.gch", "*.gch/*"),
    *("unity*.[ch]", "*/unity*.[ch]"),  # a framework of tests that packages bring along
    *("/usr/include", "/usr/local/include", "/usr/include/*-linux-*"),
    *("/usr/lib/gcc/*/*/include", "/usr/include/c++/*"),
)
# Files that steer a run: they are put back as the package has them, new ones removed.
# A pattern of folders of the machine stands for new files that are named as one there.
GUARDS = {
    "python": (
        *("*conftest.py", "*sitecustomize.py", "*usercustomize.py", "*.pth", "*.pyc"),
        *("*.so", "*pytest.ini", "setup.cfg", "tox.ini", "pyproject.toml"),
        *("unittest*", "pytest*", "_pytest*", "*canary_of_the_runner*"),
    ),
    "perl": ("*.so", "*Test/*", "*Test2/*", "*Test2.pm", "*lib/Test.pm", "*.al"),
    "javascript": _NPM,
    "typescript": (*_NPM, "*tsconfig*.json"),
    "c": _COMPILED,
    "c++": _COMPILED,
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


def is_taken(path: str, guards: Sequence[str], given: Collection[str]) -> bool:
    """Returns whether an agent's version of a file counts.

    Args:
        path: of the file.
        guards: patterns of the recipe.
        given: paths of the files that the agent started with.
    """
    if is_guarded(path, guards):
        return False
    return path in given or not _is_of_machine(path, tuple(guards))


def _is_of_machine(path: str, guards: tuple[str, ...]) -> bool:
    """Returns whether a folder that is guarded has a file of a path's last names."""
    names = path.split("/")
    ends = ["/".join(names[i:]) for i in range(len(names))]
    return any((folder / end).is_file() for folder in _folders(guards) for end in ends)


@functools.cache
def _folders(guards: tuple[str, ...]) -> list[pathlib.Path]:
    roots = [guard for guard in guards if guard.startswith("/")]
    return [path for root in roots for path in pathlib.Path("/").glob(root[1:])]


def merged(taken: Mapping[str, bytes], kept: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns an agent's files with others put over them.

    An agent's file is left out where a folder of its name is needed, or below a file.
    """
    files = {**taken, **kept}
    folders = {folder for path in files for folder in _folders_of(path)}
    return {
        path: content
        for path, content in files.items()
        if path in kept or not (path in folders or _folders_of(path) & files.keys())
    }


def _folders_of(path: str) -> set[str]:
    names = path.split("/")
    return {"/".join(names[:i]) for i in range(1, len(names))}


def is_beside(path: str) -> bool:
    """Returns whether a file lies beside a package: in its examples, tools, copies."""
    return bool(SIDE_FOLDERS & set(path.split("/")[:-1]))
