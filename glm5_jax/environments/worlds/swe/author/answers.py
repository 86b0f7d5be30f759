"""What a model is told of a package, and how its answer becomes a recipe."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import messages
from glm5_jax.environments import endpoint
from glm5_jax.environments.worlds.swe import drivers, kinds, parsers, records

# What a model may choose, with the parser of each. Java's and Go's are compiled
# together, by rules alone.
PARSERS = {
    **{"pytest": "pytest", "unittest": "unittest", "ruby": "ruby"},
    **dict.fromkeys(("perl", "node", "tape", "node-test", "c", "c++"), "tap"),
    **{"phpunit": "testdox", drivers.COMMAND: "tap"},
}
VALUE = "@VALUE@"  # of a canary: 1 where it must pass, 2 where it must fail
_KEYS = (
    *("language", "runner", "parser", "files", "roots", "sources"),
    *("setup", "command", "canary"),
)
_MOST_CHARACTERS = 20_000  # of an answer
_MOST_FILES = 500  # of a list
_MOST_LISTED = 400  # paths that a model is told
_MOST_SHOWN = 2_500  # characters of a file, and of a log
_MOST_READ = 4  # files at once
_TELLING = (  # patterns of files that tell how a package is tested
    *("README*", "Makefile", "makefile", "*.gemspec", "Rakefile", "setup.py"),
    *("pyproject.toml", "setup.cfg", "tox.ini", "package.json", "composer.json"),
    *(".github/workflows/*", ".travis.yml", ".gitlab-ci.yml", "CONTRIBUTING*"),
    *("CMakeLists.txt", "configure.ac", "Makefile.PL", "Build.PL", "phpunit.xml*"),
)
_MOST_TELLING = 6
# What a setup may run, before the tests: an agent's version is not taken.
_BUILDS = (
    *("setup.py", "*Makefile*", "*makefile", "*.mk", "*CMakeLists.txt", "*.cmake"),
    *("configure*", "*Rakefile", "*Build.PL", "*.sh", "*meson.build"),
)
_SYSTEM = f"""You find how the tests of a package run in a box of Debian: there is no \
network, nothing can be installed, and of the machine only /usr is there. The package \
is unpacked afresh for each run. Answer with one JSON object in a ```json block, either

{{"read": ["path of a file to see", "..."]}}

with at most {_MOST_READ} paths, or a recipe:

{{
  "language": "{" | ".join(kinds.ENDINGS)}",
  "runner": "{" | ".join(PARSERS)}",
  "files": ["the files of tests that pass, by path in the package"],
  "roots": ["folders that imports or headers are found in; '.' is the package's own"],
  "setup": "shell commands that run in the package's folder before the tests, or ''",
  "sources": ["C and C++: the files that each test program is linked with"],
  "command": "runner '{drivers.COMMAND}' alone: a shell command that runs the file \
$file of tests",
  "parser": "of what the runner prints: {" | ".join(parsers.PARSERS)}; or ''",
  "canary": "all runners but pytest and unittest: the text of a test file, written \
and run as the package's are, that loads the package and compares {VALUE} with 1: it \
passes where {VALUE} is replaced by 1 and fails where it is replaced by 2"
}}

A runner gets one file of tests at a time: pytest and unittest are Python's, others \
run `perl -I... FILE`, `node FILE` (tape and node-test: with tape, with --test), \
`ruby -I... FILE -v`, `phpunit FILE`, or compile FILE with the sources and run it. The \
exit code tells whether a file passed, and the parser finds the tests in it, such as \
the lines of TAP. Leave out files of tests that cannot pass here."""
_FIRST = """The package {name}. Its files:

{listing}

{texts}

{reason}

How do its tests run?"""
_AGAIN = """That does not work: {reason}.{log}

Mend the recipe, or read files."""


def first(
    name: str, files: records.Files, reason: str, log: str
) -> list[messages.Message]:
    """Returns the messages that ask for a recipe.

    Args:
        name: of the package.
        files: of the package.
        reason: why no rule finds one.
        log: of the last run by a rule, if one was tried.
    """
    asked = _FIRST.format(
        name=name,
        listing=_listing(files),
        texts=shown(files, _telling(files)),
        reason=f"What rules tried: {reason}.{_end(log)}",
    )
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]


def again(reason: str, log: str) -> messages.Message:
    """Returns the message that asks for a mended recipe."""
    return {"role": "user", "content": _AGAIN.format(reason=reason, log=_end(log))}


def shown(files: records.Files, paths: Sequence[str]) -> str:
    """Returns the beginnings of files."""
    texts = []
    for path in paths:
        text = files[path].decode(errors="replace") if path in files else "(no file)"
        cut = "\n..." if len(text) > _MOST_SHOWN else ""
        texts.append(f"--- {path}\n{text[:_MOST_SHOWN]}{cut}")
    return "\n\n".join(texts)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model wants: to read files, or to try a recipe."""

    read: tuple[str, ...] = ()
    recipe: records.Recipe | None = None  # its canary has VALUE


def read(text: str, files: records.Files) -> Answer:
    """Returns what an answer says: its last JSON block, or all of it.

    Args:
        text: of the answer.
        files: of the package.

    Raises:
        ValueError: it says nothing that can be tried.
    """
    fields = endpoint.json_object(text, _MOST_CHARACTERS)
    if [*fields] == ["read"]:
        return Answer(read=_texts(fields, "read")[:_MOST_READ])
    if unknown := sorted(set(fields) - set(_KEYS)):
        raise ValueError(f"the answer has unknown keys: {', '.join(unknown)}")
    return Answer(recipe=_recipe(fields, files))


def _recipe(fields: Mapping[str, Any], files: records.Files) -> records.Recipe:
    language = _one_of(fields, "language", kinds.ENDINGS)
    runner = _one_of(fields, "runner", PARSERS)
    tests = _paths(fields, "files", files)
    if not tests:
        raise ValueError("files names no file of tests")
    is_guarded = runner in drivers.GUARDED
    canary, command = _text(fields, "canary"), _text(fields, "command")
    if not is_guarded and VALUE not in canary:
        raise ValueError(f"the canary has no {VALUE}")
    if (runner == drivers.COMMAND) != bool(command.strip()):
        raise ValueError(f"runner {drivers.COMMAND!r}, and no other, needs a command")
    setup = _text(fields, "setup").strip()
    parser = _text(fields, "parser") or PARSERS[runner]
    if parser not in parsers.PARSERS or (is_guarded and parser != runner):
        raise ValueError(f"the runner {runner} has no parser {parser!r}")
    return records.Recipe(
        language=language,
        runner=runner,
        parser=parser,
        files=tests,
        roots=_folders(fields, files) or (".",),
        guards=(*kinds.GUARDS[language], *(_BUILDS if setup else ())),
        sources=_paths(fields, "sources", files),
        canary="" if is_guarded else canary,
        setup=setup,
        command=command.strip(),
    )


def _one_of(fields: Mapping[str, Any], key: str, known: Mapping[str, Any]) -> str:
    value = fields.get(key)
    if value not in [*known]:
        raise ValueError(f"{key} must be one of {', '.join(known)}, not {value!r}")
    return str(value)


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key) or ""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{key} must be a text")
    return value


def _texts(fields: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = fields.get(key) or []
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"{key} must be a list of texts")
    if len(value) > _MOST_FILES:
        raise ValueError(f"{key} has more than {_MOST_FILES} entries")
    return tuple(dict.fromkeys(value))


def _paths(
    fields: Mapping[str, Any], key: str, files: records.Files
) -> tuple[str, ...]:
    found = tuple(path.removeprefix("./") for path in _texts(fields, key))
    if lacking := [path for path in found if path not in files]:
        raise ValueError(f"{key}: the package has no {', '.join(lacking[:5])}")
    return found


def _folders(fields: Mapping[str, Any], files: records.Files) -> tuple[str, ...]:
    found = tuple(path.removeprefix("./") or "." for path in _texts(fields, "roots"))
    for folder in found:
        is_there = any(path.startswith(f"{folder.rstrip('/')}/") for path in files)
        if folder != "." and not is_there:
            raise ValueError(f"roots: the package has no folder {folder}")
    return tuple(folder.rstrip("/") for folder in found)


def _telling(files: records.Files) -> list[str]:
    found = [
        path
        for pattern in _TELLING
        for path in sorted(files)
        if fnmatch.fnmatchcase(path, pattern) and path.count("/") <= pattern.count("/")
    ]
    tests = [path for path in sorted(files) if kinds.is_test(path)]
    return [*dict.fromkeys([*found[:_MOST_TELLING], *tests[:1]])]


def _listing(files: records.Files) -> str:
    """Returns the paths, those of tests first if there are too many."""
    paths = sorted(files, key=lambda path: (not kinds.is_test(path), path))
    lines = sorted(paths[:_MOST_LISTED])
    rest = len(paths) - len(lines)
    return "\n".join([*lines, *([f"... and {rest} more"] if rest else [])])


def _end(log: str) -> str:
    """Returns the end of a log, to be added to a sentence."""
    return f" The log ends:\n\n{log[-_MOST_SHOWN:]}" if log.strip() else ""
