"""The command that mines: tasks from packages, and the yield by reason."""

import asyncio
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from glm5_jax import config
from glm5_jax.environments.worlds.swe import (
    mine,
    patches,
    records,
    releases,
    sources,
)
from glm5_jax.environments.worlds.swe.author import find
from glm5_jax.environments.worlds.swe.chain import mine as chain_mine

_NOT_FETCHED = "not to be fetched"


def run(
    names: str,
    out: str,
    num_tasks: int,
    seed: int,
    max_seconds: float = mine.MAX_TEST_SECONDS,
    author: Callable[[records.Folder], mine.Author] | None = None,
) -> Iterator[str]:
    """Mines packages, and yields a line of JSON for each, and one for the folder.

    Args:
        names: packages as sources.fetch names them, or "patches:NAME" for Debian's
            patches, joined by ","; or a file with one a line.
        out: folder of the tasks; packages that it has are skipped.
        num_tasks: of each package, at most.
        seed: of the order in which places are tried.
        max_seconds: of CPU that the tests of a package may take.
        author: returns the model that is asked how a single package is tested, where
            no rule finds it; None: nobody is asked.

    Raises:
        config.InputError: an argument is wrong. A package that cannot be fetched is
            counted as such.
    """
    if max_seconds <= 0:
        raise config.InputError(
            f"--max_test_seconds must be positive, got {max_seconds:g}."
        )
    if num_tasks < 1:
        raise config.InputError(f"--num_tasks must be positive, got {num_tasks}.")
    folder = records.Folder(out)
    model = author(folder) if author else None
    for name in _split(names):
        asyncio.run(_mine(name, folder, num_tasks, seed, max_seconds, model))
        yield json.dumps({"package": name, **_counts(mine.Log(folder))})
    log = mine.Log(folder)
    rates = {"recipes": _rates(log, folder)}
    total = {"folder": out, **_counts(log), **rates, "by_package": _by_package(log)}
    yield json.dumps(total, indent=2)


def _split(names: str) -> Sequence[str]:
    path = pathlib.Path(names)
    if path.is_file():
        lines = path.read_text(encoding="utf-8").split("\n")
        return [line for line in lines if line and line[0] != "#"]
    return names.split(",")


def _releases(name: str) -> list[str]:
    """Returns the packages of "NAME==OLD->NEW->...", or of folders; one has no "->"."""
    first, *later = name.split("->")
    title = first.rpartition("==")[0]
    return [first, *(f"{title}=={other}" if title else other for other in later)]


async def _mine(
    name: str,
    folder: records.Folder,
    num_tasks: int,
    seed: int,
    max_seconds: float,
    author: mine.Author | None,
) -> None:
    source = name.removeprefix(patches.PREFIX)
    try:
        if source != name:
            found = sources.fetch_patched(source)
        else:
            found = [sources.fetch(release) for release in _releases(name)]
    except config.InputError as error:
        logging.warning("%s", error)
        log = mine.Log(folder)
        if (name, "") not in log.outcomes:
            log.add(name, "", _NOT_FETCHED)
        return
    if isinstance(found, tuple):
        await patches.mine_patches(*found, folder, num_tasks, max_seconds)
    elif len(found) == 1:
        await mine.mine(found[0], folder, num_tasks, seed, max_seconds, author)
    elif len(found) == 2:
        older, newer = found
        await releases.mine_pair(older, newer, folder, num_tasks)
    else:
        await chain_mine.mine_chain(found, folder)


def _by_package(log: mine.Log) -> dict[str, dict[str, Any]]:
    """Returns the tries and tasks of every package, and what became of itself."""
    found: dict[str, dict[str, Any]] = {}
    for (package, candidate), outcome in sorted(log.outcomes.items()):
        row = found.setdefault(package, {"tried": 0, "tasks": 0})
        if candidate:
            row["tried"] += 1
            row["tasks"] += outcome == mine.MADE
        else:
            row["package"] = outcome
    return found


def _rates(log: mine.Log, folder: records.Folder) -> dict[str, dict[str, Any]]:
    """Returns for how many packages rules, and a model, found how tests run."""
    outcomes = [outcome for (_, key), outcome in log.outcomes.items() if key == ""]
    untried = (_NOT_FETCHED, *patches.UNTRIED)
    tried = [outcome for outcome in outcomes if outcome not in untried]
    found = [outcome for outcome in tried if outcome.startswith(mine.RUNS)]
    by_rules = [outcome for outcome in found if not outcome.endswith(mine.BY_MODEL)]
    rates = {"by_rules": _rate(len(tried), len(by_rules))}
    if asked := find.asked(folder.path).values():
        works = sum(entry["works"] for entry in asked)
        requests = sum(entry["requests"] for entry in asked)
        rates["by_model"] = {**_rate(len(asked), works), "requests": requests}
    return rates


def _rate(packages: int, found: int) -> dict[str, Any]:
    share = round(found / packages, 3) if packages else 0.0
    return {"packages": packages, "found": found, "share": share}


def _counts(log: mine.Log) -> dict[str, Any]:
    tried = log.counts(of_packages=False)
    return {
        "tasks": tried.get(mine.MADE, 0),
        "candidates": dict(sorted(tried.items())),
        "packages": dict(sorted(log.counts(of_packages=True).items())),
    }
