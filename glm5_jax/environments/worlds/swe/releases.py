"""Pairs of releases as tasks: the newer one's tests on the older one's source.

A whole release is one task. Where it changed several places, each place alone is one
too: the newer release without it, if a test notices. These are changes that people
made; their size is theirs.
"""

from collections.abc import Mapping

from glm5_jax.environments.worlds.swe import (
    diffs,
    kinds,
    mine,
    recipes,
    records,
    sources,
)


async def mine_pair(
    old: sources.Package, new: sources.Package, folder: records.Folder, num_tasks: int
) -> None:
    """Adds the tasks of two releases to a folder, as many as asked for at most."""
    log = mine.Log(folder)
    name = f"{new.name}-{old.version}-{new.version}"
    if (name, "") in log.outcomes:
        return
    found = await mine.find_recipe(new)
    if isinstance(found, str):
        log.add(name, "", found)
        return
    folder.add_tree(new.tree, new.files)
    others = changed(old.files, new.files)
    sources_of = set(recipes.sources(new.files, found.recipe))
    notes = {path: text for path, text in others.items() if path not in sources_of}
    made = 0
    if (name, "whole") not in log.outcomes:
        result = await mine.make_task(found, others, name, "release", old.version)
        made += log.take(name, "whole", result, folder)
    for path in sorted(sources_of & set(others)):
        for number, text in enumerate(_without(old.files, new.files, path)):
            candidate = f"{path}:{number}"
            if made >= num_tasks or (name, candidate) in log.outcomes:
                continue
            differs = {**notes, path: text}
            task_id = f"{name}-{mine.digest(candidate)}"
            result = await mine.make_task(found, differs, task_id, "place")
            made += log.take(name, candidate, result, folder)
    log.add(name, "", found.outcome())


def changed(old: records.Files, new: records.Files) -> Mapping[str, str | None]:
    """Returns the older form of every text that differs, tests apart."""
    found: dict[str, str | None] = {}
    for path in sorted({*old, *new}):
        if old.get(path) == new.get(path) or kinds.is_test(path):
            continue
        try:
            found[path] = old[path].decode() if path in old else None
        except UnicodeDecodeError:
            continue
    return found


def _without(old: records.Files, new: records.Files, path: str) -> list[str]:
    """Returns a file of the newer release without each of its places alone."""
    if path not in old:
        return []
    undo = diffs.make({path: new[path]}, {path: old[path]})
    lines = diffs.lines_of(new[path].decode())
    texts = []
    for _, hunks in diffs.parse(undo).values():
        for hunk in hunks:
            end = hunk.start + len(hunk.old)
            texts.append("".join([*lines[: hunk.start], *hunk.new, *lines[end:]]))
    return texts if len(texts) > 1 else []
