"""Mutations as tasks: a package is broken at one place, and the solution mends it.

A break becomes a task if at least one test that passed fails, no more than a third of
the tests do, and the run still ends. Everything tried is a line of FOLDER/mined.jsonl
with its outcome, from which an interrupted run resumes.
"""

import collections
import dataclasses
import hashlib
import json
import random
from collections.abc import Collection, Mapping
from typing import Protocol

from glm5_jax import config
from glm5_jax.environments.worlds.swe import (
    diffs,
    drivers,
    mutate,
    recipes,
    records,
    sources,
    statements,
    trials,
)

LOG = "mined.jsonl"
MADE = "made"  # the outcome of a candidate that became a task
RUNS, BY_MODEL = "tests run", ", by a model"  # in the outcome of a package
MAX_TRIES = 3  # for each task wanted
_MIN_TESTS = 3  # that pass, of a package
_MAX_BROKEN = 1 / 3  # of the tests that passed, by one break
_BREAKS = ("mutation", "place")  # kinds of tasks in which one place is broken
MAX_TEST_SECONDS = 4.0  # of CPU; a package with slower tests makes slow tasks
_SECONDS = 60.0  # by the clock, of a run of a package as it was published


@dataclasses.dataclass(frozen=True)
class Found:
    """A package whose tests run."""

    package: sources.Package
    recipe: records.Recipe
    trial: trials.Trial
    passing: frozenset[str]  # in both of two runs
    by: str = ""  # BY_MODEL, or "": by a rule

    def outcome(self) -> str:
        """Returns what the log says of the package."""
        return f"{RUNS} ({self.recipe.language}){self.by}"


@dataclasses.dataclass(frozen=True)
class Failed:
    """A recipe that does not work, or none."""

    reason: str
    log: str = ""  # of its last run


class Author(Protocol):
    """A model that finds recipes where no rule does; author/find.py has it."""

    def has_asked(self, package: sources.Package) -> bool:
        """Returns whether it was asked for a package before."""
        ...

    async def find(
        self, package: sources.Package, failed: Failed, max_seconds: float
    ) -> Found | Failed:
        """Returns a recipe that works, or what came of the last one."""
        ...


class Log:
    """The outcomes of everything that was tried."""

    def __init__(self, folder: records.Folder) -> None:
        """Opens the log of a folder, which is made if it does not exist."""
        folder.path.mkdir(parents=True, exist_ok=True)
        self._path = folder.path / LOG
        lines = self._path.read_text("utf-8").splitlines() if self.is_there() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        self.outcomes = {(e["package"], e["candidate"]): e["outcome"] for e in entries}

    def is_there(self) -> bool:
        """Returns whether something was tried before."""
        return self._path.is_file()

    def add(self, package: str, candidate: str, outcome: str) -> None:
        """Appends an outcome; the candidate "" is the package itself."""
        self.outcomes[package, candidate] = outcome
        entry = {"package": package, "candidate": candidate, "outcome": outcome}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def take(
        self,
        package: str,
        candidate: str,
        result: records.Record | str,
        folder: records.Folder,
    ) -> int:
        """Adds a candidate, and its task to the folder; returns how many there are."""
        if isinstance(result, str):
            self.add(package, candidate, result)
            return 0
        folder.add(result)
        self.add(package, candidate, MADE)
        return 1

    def counts(self, of_packages: bool) -> Mapping[str, int]:
        """Returns how often each outcome occurred, of packages or of candidates."""
        return collections.Counter(
            outcome
            for (_, candidate), outcome in self.outcomes.items()
            if (candidate == "") == of_packages
        )


async def find_recipe(
    package: sources.Package, max_seconds: float = MAX_TEST_SECONDS
) -> Found | str:
    """Returns the first recipe under which a package's tests pass, or why none does.

    Args:
        package: to test.
        max_seconds: of CPU; slower tests count as none.

    Raises:
        config.InputError: the machine lacks the programs of every recipe.
    """
    found = await by_rules(package, max_seconds)
    return found.reason if isinstance(found, Failed) else found


async def by_rules(
    package: sources.Package, max_seconds: float = MAX_TEST_SECONDS
) -> Found | Failed:
    """Returns the first recipe under which a package's tests pass; see find_recipe."""
    failed, lacking, was_tried = Failed("no tests that a rule finds"), "", False
    for recipe in recipes.candidates(package.files):
        if lacks := drivers.missing(recipe):
            lacking = f"{package.name}: tests in {recipe.language} need more: {lacks}."
            continue
        found = await attempt(package, recipe, max_seconds)
        if isinstance(found, Found):
            return found
        failed, was_tried = found, True
    if lacking and not was_tried:
        raise config.InputError(lacking)
    return failed


async def attempt(
    package: sources.Package, recipe: records.Recipe, max_seconds: float
) -> Found | Failed:
    """Returns a recipe, without the files that do not pass, or why it does not work."""
    trial = await trials.run(package.files, recipe, _SECONDS)
    bad = [f for f in recipe.files if not _passes_in(f, trial)]
    if bad and len(bad) < len(recipe.files):  # e.g. one needs another package
        files = tuple(f for f in recipe.files if f not in bad)
        recipe = dataclasses.replace(recipe, files=files)
        trial = await trials.run(package.files, recipe, _SECONDS)
    if trial.problem:
        return Failed(trial.problem, trial.log)
    if len(trial.passed()) < _MIN_TESTS:
        return Failed("hardly any test passes", trial.log)
    if trial.cpu_seconds > max_seconds:
        return Failed("the tests are slow", trial.log)
    again = await trials.run(package.files, recipe, _SECONDS)
    passing = frozenset(trial.passed() & again.passed())
    if len(passing) < _MIN_TESTS:
        return Failed("two runs disagree", again.log)
    return Found(package, recipe, trial, passing)


def _passes_in(file: str, trial: trials.Trial) -> bool:
    """Returns whether a file has a test that passes; names of tests tell their file."""
    names = (file, file.removesuffix(".py").replace("/", "."))
    stem = names[1].rpartition(".")[2]
    return any(
        outcome == "passed"
        and (test.startswith(names) or f"{stem}." in test.partition("::")[0] + ".")
        for test, outcome in trial.outcomes.items()
    )


async def mine(
    package: sources.Package,
    folder: records.Folder,
    num_tasks: int,
    seed: int,
    max_seconds: float = MAX_TEST_SECONDS,
    author: Author | None = None,
) -> None:
    """Adds tasks from a package to a folder, as many as asked for if it has them.

    Args:
        package: to break.
        folder: of the tasks.
        num_tasks: that are wanted.
        seed: of the order in which places are tried.
        max_seconds: of CPU; slower tests count as none.
        author: is asked where no rule finds a recipe, also of packages of an earlier
            run.
    """
    log = Log(folder)
    name = package.tree
    known = log.outcomes.get((name, ""), "")
    is_new = author is not None and not author.has_asked(package)
    if known and (known.startswith(RUNS) or not is_new):
        return  # done before
    found = await by_rules(package, max_seconds)
    if isinstance(found, Failed) and author is not None:
        found = await author.find(package, found, max_seconds)
    if isinstance(found, Failed):
        log.add(name, "", found.reason)
        return
    folder.add_tree(package.tree, package.files)
    candidates = _candidates(found)
    random.Random(f"{seed}/{name}").shuffle(candidates)
    made = sum(
        key[0] == name and outcome == MADE for key, outcome in log.outcomes.items()
    )
    for path, cut in candidates[: MAX_TRIES * num_tasks]:
        candidate = f"{path}:{cut.start}:{cut.operator}:{cut.new[:20]}"
        if made >= num_tasks:
            break
        if (name, candidate) in log.outcomes:
            continue
        changed = {path: cut.apply(package.files[path].decode())}
        task_id = f"{name}-{digest(f'{path}/{cut}')}"
        result = await make_task(found, changed, task_id)
        made += log.take(name, candidate, result, folder)
    log.add(name, "", found.outcome())


def _candidates(found: Found) -> list[tuple[str, mutate.Break]]:
    result = []
    for path in recipes.sources(found.package.files, found.recipe):
        try:
            text = found.package.files[path].decode()
        except UnicodeDecodeError:
            continue
        if "\r" not in text:
            language = found.recipe.language
            result += [(path, cut) for cut in mutate.breaks(text, language)]
    return result


async def make_task(
    found: Found,
    changed: Mapping[str, str | None],
    task_id: str,
    kind: str = "mutation",
    base_version: str = "",
) -> records.Record | str:
    """Returns the task of undoing a change of a package, or why it is none.

    Args:
        found: the package, which is the solution.
        changed: the files in which an agent's tree differs; None: it is not there.
            Tests among them stay as the package has them.
        task_id: of the task.
        kind: of the record.
        base_version: the release that an agent starts from, for a whole release.
    """
    package, recipe = found.package, found.recipe
    files = dict(package.files)
    hidden = recipes.hidden(files, recipe)
    changed = {path: text for path, text in changed.items() if path not in hidden}
    broken = {path: text for path, text in files.items() if path not in changed}
    broken |= {
        path: text.encode() for path, text in changed.items() if text is not None
    }
    trial = await trials.run(broken, recipe, max(10.0, 4 * found.trial.seconds))
    if trial.problem:
        return trial.problem
    failing = sorted(found.passing - trial.passed())
    if not failing:
        return "no test fails"
    if kind in _BREAKS and len(failing) > _MAX_BROKEN * len(found.passing):
        return "most tests fail"
    patch, is_whole = _patch(found, broken, changed)
    if not is_whole:  # what it leaves out may matter
        solved = await trials.run(diffs.apply(patch, broken), recipe)
        if found.passing - solved.passed():
            return "the sources alone do not solve it"
    told = (trial.log, found.trial.log, patch, failing)
    tests = {path: files[path] for path in hidden}
    statement = statements.write(package.name, recipe.language, *told, tests)
    return records.Record(
        instance_id=task_id,
        repo=package.name,
        version=package.version,
        base_version=base_version,
        kind=kind,
        tree=package.tree,
        tests=package.tree,
        source=package.source,
        recipe=recipe,
        hidden=hidden,
        changed=changed,
        patch=patch,
        FAIL_TO_PASS=tuple(failing),
        PASS_TO_PASS=tuple(sorted(found.passing & trial.passed())),
        problem_statement=statement,
    )


def _patch(
    found: Found, broken: records.Files, changed: Collection[str]
) -> tuple[str, bool]:
    """Returns the solution, of sources alone, and whether it undoes every change."""
    recipe, files = found.recipe, found.package.files
    known = {*recipes.sources(files, recipe), *recipes.sources(broken, recipe)}
    before, after = (
        {path: tree[path] for path in known & set(tree) & set(changed)}
        for tree in (broken, files)
    )
    return diffs.make(before, after), not set(changed) - known


def digest(text: str) -> str:
    """Returns ten letters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]
