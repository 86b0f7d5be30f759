"""Mines a chain: each later release is an issue for the tree that solved those before.

The agent starts from the first release and never gets another one. A release becomes a
link if a test of its own fails on that tree, and the changes of its sources alone let
all of its tests pass. Another release is skipped: its changes are then part of the next
link's.
"""

import dataclasses
from collections.abc import Sequence

from glm5_jax.environments.worlds.swe import (
    diffs,
    kinds,
    mine,
    recipes,
    records,
    sources,
    statements,
    trials,
)
from glm5_jax.environments.worlds.swe.chain import stored

CANDIDATE = "chain"  # in the log; its links are named by their releases
LINK = "a link"
_MIN_LINKS = 2


@dataclasses.dataclass(frozen=True)
class _Link:
    record: records.Record  # without its statement
    log: str  # of the tests that fail
    known_log: str  # of the same tests, solved
    tree: records.Files  # that solves it, without tests


async def mine_chain(
    releases: Sequence[sources.Package], folder: records.Folder
) -> None:
    """Adds the chain of some releases to a folder, if they give one.

    Args:
        releases: of one package, the oldest first.
        folder: of the chain.
    """
    log = mine.Log(folder)
    first = releases[0]
    name = "-".join([first.name, *(release.version for release in releases)])
    if (name, CANDIDATE) in log.outcomes:
        return
    found = [await mine.find_recipe(release) for release in releases[1:]]
    hidden = _hidden(releases, found)
    start = {path: text for path, text in first.files.items() if path not in hidden}
    trees: list[records.Files] = [start]
    links: list[_Link] = []
    for release, tests in zip(releases[1:], found, strict=True):
        made = tests
        if isinstance(tests, mine.Found):
            made = await _link(f"{name}/{len(links) + 1}", first, tests, hidden, trees)
        if isinstance(made, _Link):
            trees.append(made.tree)
            links.append(made)
        if (name, release.version) not in log.outcomes:
            told = made if isinstance(made, str) else LINK
            log.add(name, release.version, told)
    if len(links) < _MIN_LINKS:
        log.add(name, CANDIDATE, f"fewer than {_MIN_LINKS} links")
        return
    tested = {link.record.tests for link in links}
    for release in releases:
        if release is first or release.tree in tested:
            folder.add_tree(release.tree, release.files)
    chain = stored.Chain(chain_id=name, repo=first.name, links=_told(links))
    stored.add(folder, chain)
    log.add(name, CANDIDATE, mine.MADE)


def _hidden(
    releases: Sequence[sources.Package], found: Sequence[mine.Found | str]
) -> set[str]:
    """Returns the tests of all releases."""
    hidden = {path for r in releases for path in r.files if kinds.is_test(path)}
    for one in found:
        if isinstance(one, mine.Found):
            hidden.update(one.recipe.files)
    return hidden


async def _link(
    link_id: str,
    first: sources.Package,
    found: mine.Found,
    hidden: set[str],
    trees: Sequence[records.Files],
) -> _Link | str:
    """Returns the link of a release, or why it is none.

    Args:
        link_id: name of the link.
        first: the release that the agent starts from.
        found: the release, with what passes.
        hidden: files that the agent never gets.
        trees: that the agent has at the start, and after each of the links before.
    """
    package, recipe = found.package, found.recipe
    tests = {path: package.files[path] for path in hidden & set(package.files)}
    seconds = max(10.0, 4 * found.trial.seconds)
    before = await trials.run({**trees[-1], **tests}, recipe, seconds)
    if before.problem:
        return before.problem
    failing = found.passing - before.passed()
    if not failing:
        return "no test fails"
    patch = _patch(trees[-1], package.files, recipe, hidden)
    if any(recipes.is_guarded(path, recipe) for path in diffs.parse(patch)):
        return "a file that steers the tests changed"
    tree = diffs.apply(patch, trees[-1])
    solved = await trials.run({**tree, **tests}, recipe, seconds)
    if found.passing - solved.passed():
        return "the sources alone do not solve it"
    for earlier in trees[:-1]:
        trial = await trials.run({**earlier, **tests}, recipe, seconds)
        if found.passing <= trial.passed():
            return "an earlier tree solves it"
    record = records.Record(
        instance_id=link_id,
        repo=package.name,
        version=package.version,
        kind="link",
        tree=first.tree,
        tests=package.tree,
        source=package.source,
        recipe=recipe,
        hidden=tuple(sorted(hidden)),
        changed=_changed(trees[0], trees[-1]),
        patch=patch,
        FAIL_TO_PASS=tuple(sorted(failing)),
        PASS_TO_PASS=tuple(sorted(found.passing & before.passed())),
        problem_statement="",
    )
    return _Link(record, before.log, found.trial.log, tree)


def _patch(
    old: records.Files, new: records.Files, recipe: records.Recipe, hidden: set[str]
) -> str:
    """Returns the changes of the sources."""
    known = {*recipes.sources(old, recipe), *recipes.sources(new, recipe)} - hidden
    before, after = (
        {path: tree[path] for path in known & set(tree)} for tree in (old, new)
    )
    return diffs.make(before, after)


def _changed(first: records.Files, tree: records.Files) -> dict[str, str | None]:
    """Returns what an agent's tree has instead of the first release's, all of it text.

    None stands for a file that is not there any more.
    """
    changed: dict[str, str | None] = {path: None for path in first if path not in tree}
    changed |= {
        path: text.decode() for path, text in tree.items() if text != first.get(path)
    }
    return changed


def _told(links: Sequence[_Link]) -> tuple[records.Record, ...]:
    """Returns the records with their statements, which tell of no later link either."""
    result = []
    for number, link in enumerate(links):
        later = [one.record for one in links[number:]]
        statement = statements.write(
            link.record.repo,
            link.record.recipe.language,
            link.log,
            link.known_log,
            "".join(one.patch for one in later),
            {name for one in later for name in one.FAIL_TO_PASS},
        )
        record = dataclasses.replace(link.record, problem_statement=statement)
        result.append(record)
    return tuple(result)
