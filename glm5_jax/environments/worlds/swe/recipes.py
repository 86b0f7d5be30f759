"""Finds how a package is tested, by rules: its language, runner, files and parser.

`candidates` proposes recipes, the likeliest first. mine.py runs them and keeps the
first one under which tests pass.
"""

import pathlib
import re
from collections.abc import Collection, Iterator

from glm5_jax.environments.worlds.swe import (
    javascript,
    kinds,
    records,
    toolchains,
)

_NO_SOURCES = ("setup.py", "conftest.py", "Makefile.PL", "Build.PL", "versioneer.py")
_MAIN = re.compile(rb"^\s*(?:int|void)?(?:\s+[A-Z_]+)?\s*main\s*\(", re.MULTILINE)


def candidates(files: records.Files) -> list[records.Recipe]:
    """Returns recipes for a package's files, the likeliest first, or none."""
    finders = (_python, _perl, javascript.find, *toolchains.FINDERS, _c)
    return [recipe for find in finders for recipe in find(files)]


def hidden(files: records.Files, recipe: records.Recipe) -> tuple[str, ...]:
    """Returns the files of the tests, which an agent does not get."""
    return tuple(
        path for path in sorted(files) if kinds.is_test(path) or path in recipe.files
    )


def sources(files: records.Files, recipe: records.Recipe) -> list[str]:
    """Returns the files that tests of a recipe may depend on, to be broken."""
    outside = set(hidden(files, recipe))
    return [
        path
        for path in sorted(files)
        if path.endswith(kinds.ENDINGS[recipe.language])
        and not path.endswith(kinds.DECLARATIONS)
        and path not in outside
        and not is_guarded(path, recipe)
        and path.rpartition("/")[2] not in _NO_SOURCES
        and _is_inside(path, recipe)
    ]


def _is_inside(path: str, recipe: records.Recipe) -> bool:
    if recipe.language == "java":  # its folders are names, such as "cli"
        return path.startswith(f"{recipe.roots[0]}/")
    return not kinds.is_beside(path)


def is_guarded(path: str, recipe: records.Recipe) -> bool:
    """Returns whether a file steers the run: an agent's version is not taken."""
    return kinds.is_guarded(path, guards(recipe))


def is_taken(path: str, recipe: records.Recipe, given: Collection[str]) -> bool:
    """Returns whether an agent's version of a file counts; see kinds.py."""
    return kinds.is_taken(path, guards(recipe), given)


def guards(recipe: records.Recipe) -> tuple[str, ...]:
    """Returns the patterns of guarded files, also those that came after the recipe."""
    known = (*recipe.guards, *kinds.GUARDS.get(recipe.language, ()), *recipe.files)
    return tuple(dict.fromkeys(known))


def _texts(files: records.Files, endings: tuple[str, ...]) -> dict[str, bytes]:
    return {p: files[p] for p in sorted(files) if p.endswith(endings)}


def _python(files: records.Files) -> Iterator[records.Recipe]:
    tests = {
        path: text
        for path, text in _texts(files, (".py",)).items()
        if kinds.is_test(path)
        and "test" in path.rpartition("/")[2]
        and b"def test" in text
        and not kinds.is_beside(path)
    }
    if not tests:
        return
    roots = tuple(
        r for r in ("src", "lib") if any(p.startswith(f"{r}/") for p in files)
    )
    is_plain = all(b"TestCase" in t and b"pytest" not in t for t in tests.values())
    for runner in ("unittest", "pytest") if is_plain else ("pytest",):
        yield records.Recipe(
            language="python",
            runner=runner,
            parser=runner,
            files=tuple(tests),
            roots=(*roots, "."),
            guards=kinds.GUARDS["python"],
        )


def _perl(files: records.Files) -> Iterator[records.Recipe]:
    tests = [p for p in sorted(files) if re.fullmatch(r"t/[^/]+\.t", p)]
    modules = [p for p in sources_named(files, "lib/", ".pm") if p.startswith("lib/")]
    if not tests or not modules:
        return
    loads = "".join(f"eval {{ require './{path}'; }};\n" for path in modules[:8])
    yield records.Recipe(
        language="perl",
        runner="perl",
        parser="tap",
        files=tuple(tests),
        roots=("lib", "."),
        guards=kinds.GUARDS["perl"],
        canary=f"use Test::More tests => 1;\n{loads}ok(0, 'must fail');\n",
    )


def sources_named(files: records.Files, start: str, ending: str) -> list[str]:
    """Returns the paths with a start and an ending, the shortest first."""
    found = [p for p in files if p.startswith(start) and p.endswith(ending)]
    return sorted(found, key=lambda path: (len(path), path))


def _c(files: records.Files) -> Iterator[records.Recipe]:
    for language, ending in (("c", ".c"), ("c++", ".cpp"), ("c++", ".cc")):
        programs = [p for p, t in _texts(files, (ending,)).items() if _MAIN.search(t)]
        tests = [
            path
            for path in programs
            if (kinds.is_test(path) or "test" in path.rpartition("/")[2])
            and not {"unity", "googletest", *kinds.SIDE_FOLDERS} & set(path.split("/"))
        ]
        if not tests:
            continue
        frameworks = [p for p in files if p.endswith("/unity.c")][:1]
        library = [
            path
            for path in _texts(files, (ending,))
            if path not in (*programs, *frameworks)
            and not kinds.is_test(path)
            and not kinds.is_beside(path)
        ]
        headers = {
            str(pathlib.PurePosixPath(p).parent) for p in files if p.endswith(".h")
        }
        yield records.Recipe(
            language=language,
            runner=language,
            parser="unity" if frameworks else "tap",
            files=tuple(tests),
            roots=tuple(sorted({".", *headers})),
            guards=kinds.GUARDS[language],
            sources=(*library, *frameworks),
            canary="int main(void) { return 1; }\n",
        )
