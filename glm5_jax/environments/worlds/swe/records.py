"""Tasks of software engineering as they are stored: a folder of records and trees.

FOLDER/tasks.jsonl has one record a line, FOLDER/trees/NAME the packages as they were
published. An agent gets the tree with `changed` written over it and `hidden` removed;
its work is scored with the files of `hidden` put back, as `tests` has them.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from glm5_jax import config
from glm5_jax.environments.worlds.swe import diffs

TASKS = "tasks.jsonl"
TREES = "trees"
MAX_FILE_BYTES = 2**20  # larger files of a package are not kept
Files = Mapping[str, bytes]  # by path relative to the root


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The way a package is tested."""

    language: str
    runner: str  # one of drivers.RUNNERS
    parser: str  # one of parsers.PARSERS
    files: tuple[str, ...]  # that the runner gets, in this order
    roots: tuple[str, ...] = (".",)  # folders that imports and headers are found in
    guards: tuple[str, ...] = ()  # patterns of files that an agent cannot change
    sources: tuple[str, ...] = ()  # that each test program is linked with
    canary: str = ""  # a test that must fail, in the language; "": the runner has one
    setup: str = ""  # shell commands in the package's folder before the tests
    command: str = ""  # of the runner "command": runs the file $file of tests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A task; the fields in capitals and the statement have SWE-bench's meaning."""

    instance_id: str
    repo: str
    version: str
    kind: str  # "mutation", "release", "place" (of a release), "patch", "link"
    tree: str  # folder of the package below trees/
    tests: str  # folder that hidden files are taken from
    source: str  # where the package came from, with the sha256 of its archive
    recipe: Recipe
    hidden: tuple[str, ...]
    changed: Mapping[str, str | None]  # path to text; None: not in the agent's tree
    patch: str  # the solution
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...]
    problem_statement: str
    base_version: str = ""  # of a whole release: the one before

    def to_json(self) -> str:
        """Returns the record on one line."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def from_json(line: str) -> Record:
    """Returns the record of a line.

    Raises:
        config.InputError: it is no record.
    """
    try:
        fields: dict[str, Any] = json.loads(line)
        recipe = recipe_of(fields.pop("recipe"))
        return Record(recipe=recipe, **{k: _tuple(v) for k, v in fields.items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise config.InputError(
            f"{TASKS} has a line that is no task of this version ({error}); mine the "
            f"package anew into another folder."
        ) from error


def recipe_of(fields: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of an object of JSON."""
    return Recipe(**{key: _tuple(value) for key, value in fields.items()})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Folder:
    """A folder of tasks."""

    def __init__(self, path: str | pathlib.Path) -> None:
        """Opens a folder, which need not exist if tasks are to be added."""
        self.path = pathlib.Path(path)
        self.tree = functools.lru_cache(maxsize=8)(self._read_tree)

    def records(self) -> list[Record]:
        """Returns the tasks in the order in which they were added.

        Raises:
            config.InputError: the folder has no tasks, or a line is no task.
        """
        file = self.path / TASKS
        if not file.is_file():
            raise config.InputError(
                f"swe:{self.path}: there is no {file}; make tasks by `python -m "
                f"glm5_jax.environments mine NAME==VERSION --out={self.path}`."
            )
        lines = file.read_text(encoding="utf-8").splitlines()
        return [from_json(line) for line in lines if line]

    def add(self, record: Record) -> None:
        """Appends a task."""
        with (self.path / TASKS).open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")

    def add_tree(self, name: str, files: Files) -> None:
        """Stores a package's files, unless a tree of this name is there.

        Raises:
            config.InputError: a path leads out of the package's folder.
        """
        for path in files:
            _check_inside(name, path)
        target = self.path / TREES / name
        if target.is_dir():
            return
        partial = target.with_name(f".{name}.partial")
        for path, content in files.items():
            file = partial / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        partial.rename(target)

    def _read_tree(self, name: str) -> Files:
        root = self.path / TREES / name
        if not root.is_dir():
            raise config.InputError(
                f"swe:{self.path}: the tree {name} of its tasks is missing; copy "
                f"{TREES}/ together with {TASKS}."
            )
        return dict(_read(root))

    def agent_tree(self, record: Record) -> Files:
        """Returns the files that an agent starts from."""
        files = {
            path: content
            for path, content in self.tree(record.tree).items()
            if path not in record.hidden and path not in record.changed
        }
        written = record.changed.items()
        return files | {
            path: text.encode() for path, text in written if text is not None
        }

    def solved_tree(self, record: Record) -> Files:
        """Returns the agent's tree with the solution applied."""
        return diffs.apply(record.patch, self.agent_tree(record))

    def hidden_tree(self, record: Record) -> Files:
        """Returns the files that score a task: its tests and what they read."""
        tests = self.tree(record.tests)
        return {path: tests[path] for path in record.hidden if path in tests}


def _check_inside(name: str, path: str) -> None:
    parts = pathlib.PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts:
        raise config.InputError(
            f"the package {name} has a file {path!r}, which is not below its folder; "
            f"leave it out of the package or of the task's tree and patches."
        )


def _read(root: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            yield path.relative_to(root).as_posix(), path.read_bytes()
