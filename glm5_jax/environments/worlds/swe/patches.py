"""Debian's patches as tasks: a source package with all of its patches but one.

The solution is that patch, and Debian's people wrote or took it. The package's own
tests, as the patches leave them, decide whether it is a task: some fail without it.
dep3.py makes the statement from what the patch says of itself.
"""

import dataclasses
from collections.abc import Mapping

from glm5_jax import config
from glm5_jax.environments.worlds.swe import (
    dep3,
    diffs,
    mine,
    recipes,
    records,
    releases,
    sources,
)

PREFIX = "patches:"
UNTRIED = ("no patches", "no patch of a source")  # of packages whose tests did not run


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A patch that changes a source."""

    patch: str
    solved: sources.Package  # with it, and without those that need it
    changed: Mapping[str, str | None]  # what differs without it


async def mine_patches(
    package: sources.Package,
    series: Mapping[str, str],
    folder: records.Folder,
    num_tasks: int,
    max_seconds: float = mine.MAX_TEST_SECONDS,
) -> None:
    """Adds the tasks of a package's patches to a folder.

    Args:
        package: without its patches.
        series: the patches by name, in their order.
        folder: of the tasks.
        num_tasks: at most.
        max_seconds: of CPU that the package's tests may take.
    """
    log = mine.Log(folder)
    name = package.tree
    if (name, "") in log.outcomes:
        return
    outcome = UNTRIED[1 if series else 0]
    found: dict[str, mine.Found | str] = {}
    made = 0
    for patch in series:
        if made >= num_tasks or (name, patch) in log.outcomes:
            continue
        candidate = _candidate(package, series, patch)
        if isinstance(candidate, str):
            log.add(name, patch, candidate)
            continue
        solved = candidate.solved
        if solved.tree not in found:
            found[solved.tree] = await mine.find_recipe(solved, max_seconds)
        tested = found[solved.tree]
        if isinstance(tested, str):
            outcome = tested
            log.add(name, patch, tested)
            continue
        outcome = tested.outcome()
        folder.add_tree(solved.tree, solved.files)
        result = await _make(tested, candidate, series[patch])
        made += log.take(name, patch, result, folder)
    log.add(name, "", outcome)


def _candidate(
    package: sources.Package, series: Mapping[str, str], patch: str
) -> _Candidate | str:
    """Returns a patch with what it changes, or why it is no task.

    Patches that do not fit without it are on neither side.
    """
    files, fitting = _applied(package.files, series)
    if patch not in fitting:
        return "does not fit"
    others = {name: text for name, text in fitting.items() if name != patch}
    without, left = _applied(package.files, others)
    version = package.version
    if needing := set(others) - set(left):
        kept = {name: text for name, text in fitting.items() if name not in needing}
        files, _ = _applied(package.files, kept)
        version += f"-{mine.digest(repr(sorted(needing)))}"
    solved = dataclasses.replace(package, version=version, files=files)
    changed = releases.changed(without, files)
    known = {
        path
        for recipe in recipes.candidates(files)
        for path in recipes.sources(files, recipe)
    }
    if not known & set(changed):
        return "no source is changed"
    return _Candidate(patch, solved, changed)


def _applied(
    files: records.Files, series: Mapping[str, str]
) -> tuple[records.Files, dict[str, str]]:
    """Returns the files with each patch that fits, and those patches.

    A patch that needs fuzz does not fit, nor one of a file that is no text in UTF-8.
    """
    fitting = {}
    for name, text in series.items():
        try:
            files = diffs.apply(text, files)
        except (config.InputError, UnicodeDecodeError):
            continue
        fitting[name] = text
    return files, fitting


async def _make(
    found: mine.Found, candidate: _Candidate, text: str
) -> records.Record | str:
    task_id = f"{found.package.tree}-{mine.digest(candidate.patch)}"
    record = await mine.make_task(found, candidate.changed, task_id, "patch")
    if isinstance(record, str):
        return record
    told = dep3.statement(record, dep3.read(text, candidate.patch), text)
    return dataclasses.replace(record, problem_statement=told)
