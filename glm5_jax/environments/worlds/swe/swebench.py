"""SWE-bench's format, read and written: a JSON line a task.

What SWE-bench keeps in a repository and an image, a commit and the commands that test
it, is here a tree and a recipe. They are written as keys of our own, `tree` and
`recipe`, and a line without them is read if the caller gives them.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from glm5_jax import config
from glm5_jax.environments.worlds.swe import diffs, recipes, records, sources

_KEYS = ("instance_id", "repo", "patch", "test_patch", "problem_statement")
_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


def write(folder: records.Folder, record: records.Record) -> str:
    """Returns a task as a line: its patches apply to the agent's tree."""
    given = folder.agent_tree(record)
    hidden = folder.hidden_tree(record)
    line = {
        "instance_id": record.instance_id,
        "repo": record.repo,
        "base_commit": record.tree,
        "version": record.version,
        "patch": record.patch,
        "test_patch": diffs.make({}, hidden),
        "problem_statement": record.problem_statement,
        "hints_text": "",
        "created_at": "",
        "environment_setup_commit": record.tree,
        **{key: json.dumps(getattr(record, key)) for key in _LISTS},
        "recipe": dataclasses.asdict(record.recipe),
        "tree": {path: text.decode("latin-1") for path, text in given.items()},
    }
    return json.dumps(line, sort_keys=True)


def read(
    line: str,
    folder: records.Folder,
    tree: records.Files | None = None,
    recipe: records.Recipe | None = None,
) -> records.Record:
    """Returns the task of a line, whose trees are added to a folder.

    Args:
        line: of JSON.
        folder: that takes the trees; the task itself is not added.
        tree: the repository at base_commit; None: the line has it.
        recipe: how the tests run; None: the line has it, or a rule finds it.

    Raises:
        config.InputError: a key is missing, or a patch does not fit.
    """
    fields = json.loads(line)
    if missing := [key for key in (*_KEYS, *_LISTS) if key not in fields]:
        raise config.InputError(
            f"a task of SWE-bench needs {', '.join(missing)}; give the line whole."
        )
    given = tree if tree is not None else _tree_of(fields)
    tested = diffs.apply(fields["test_patch"], given)
    recipe = recipe or _recipe_of(fields, tested)
    name = fields["instance_id"].replace("/", "__")
    solved = diffs.apply(fields["patch"], tested)
    package = sources.Package(name, "solved", "swe-bench", solved)
    folder.add_tree(package.tree, solved)
    hidden = {*recipes.hidden(tested, recipe), *diffs.parse(fields["test_patch"])}
    touched = diffs.parse(fields["patch"])
    changed = {
        path: given[path].decode() if path in given else None
        for path in {*touched, *(new for new, _ in touched.values() if new)}
    }
    return records.Record(
        instance_id=fields["instance_id"],
        repo=fields["repo"],
        version=str(fields.get("version", "")),
        kind="swe-bench",
        tree=package.tree,
        tests=package.tree,
        source=f"swe-bench:{fields['instance_id']}",
        recipe=recipe,
        hidden=tuple(sorted(hidden)),
        changed=changed,
        patch=fields["patch"],
        FAIL_TO_PASS=_names(fields["FAIL_TO_PASS"]),
        PASS_TO_PASS=_names(fields["PASS_TO_PASS"]),
        problem_statement=fields["problem_statement"],
    )


def _tree_of(fields: Mapping[str, Any]) -> records.Files:
    if "tree" not in fields:
        raise config.InputError(
            f"{fields['instance_id']}: the line has no tree; give the files of "
            f"{fields['repo']} at {fields.get('base_commit', 'base_commit')}."
        )
    return {path: text.encode("latin-1") for path, text in fields["tree"].items()}


def _recipe_of(fields: Mapping[str, Any], tested: records.Files) -> records.Recipe:
    if "recipe" in fields:
        return records.recipe_of(fields["recipe"])
    found = recipes.candidates(tested)
    if not found:
        raise config.InputError(
            f"{fields['instance_id']}: no rule finds how its tests run; give a recipe."
        )
    return found[0]


def _names(value: str | list[str]) -> tuple[str, ...]:
    """Returns names of tests, which SWE-bench keeps as JSON in a string."""
    return tuple(json.loads(value) if isinstance(value, str) else value)
