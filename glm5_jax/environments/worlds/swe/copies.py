"""Finds what an agent must not read: the solution, the tests, and copies on the host.

A box sees /usr and the folder of a test runner. Programs there bring packages of their
own along, perhaps the very one that a task is about, in this release or another.
"""

import functools
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence

from glm5_jax.environments.worlds.swe import records

USR = pathlib.Path("/usr")
# Folders of these names are in many packages.
_COMMON = frozenset(("bin", "dist", "include", "lib", "src", "t", "test", "tests"))
# Languages' own libraries, without which programs do not run: a task whose solution is
# there is not proven.
_CORES = (sysconfig.get_path("stdlib"), "/usr/lib/python3.", "/usr/share/perl/")


def secrets(folder: records.Folder, record: records.Record) -> records.Files:
    """Returns the texts of the solution and of the tests that an agent does not have.

    Args:
        folder: of the task.
        record: the task.
    """
    given = folder.agent_tree(record)
    secret = {**folder.solved_tree(record), **folder.hidden_tree(record)}
    known = {*given.values(), b""}
    return {
        path: text
        for path, text in secret.items()
        if text not in known and b"\0" not in text  # such as byte code of __init__.py
    }


def on_host(
    files: records.Files, roots: Sequence[pathlib.Path] = (USR,)
) -> tuple[pathlib.Path, ...]:
    """Returns what to hide of the host, so that no other copy of files can be read.

    Args:
        files: by path in their package. What counts as a copy is the folder of another
            package in which a file has the same name and is in a folder of the same
            name, or a file with the same name and content.
        roots: folders of the host that a box sees.
    """
    found = {
        pathlib.Path(path)
        for root in roots
        for name in files
        for path in _copies(root, name, files[name])
    }
    return outermost(found)


def outermost(paths: Collection[pathlib.Path]) -> tuple[pathlib.Path, ...]:
    """Returns the paths that are below none of the others, sorted."""
    return tuple(sorted(p for p in paths if not any(q in paths for q in p.parents)))


def _copies(root: pathlib.Path, name: str, content: bytes) -> Iterator[str]:
    parts = name.split("/")
    for other in _paths(root).get(parts[-1], ()):
        theirs = other.split("/")
        same = 0
        while same < len(parts) and parts[-same - 1] == theirs[-same - 1]:
            same += 1
        if same > 1 and parts[-same] not in _COMMON:
            yield "/".join(theirs[: len(theirs) - same + 1])
        elif _digest(other) == hashlib.sha256(content).hexdigest():
            yield other


@functools.cache
def _paths(root: pathlib.Path) -> Mapping[str, list[str]]:
    """Returns the files below a folder by their names."""
    found: dict[str, list[str]] = {}
    for here, _, names in os.walk(root):
        if not f"{here}/".startswith(_CORES) or "-packages" in here:
            for name in names:
                found.setdefault(name, []).append(f"{here}/{name}")
    return found


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:  # a link to nowhere, or a file that root alone reads
        return ""
