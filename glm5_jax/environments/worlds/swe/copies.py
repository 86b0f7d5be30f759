"""Finds what an agent must not read: the solution, the tests, and copies on the host.

A box sees /usr. Programs there bring packages of their own along, perhaps the very one
that a task is about, in this release or another.
"""

import functools
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Mapping

from glm5_jax.environments.worlds.swe import records

_ROOT = "/usr"
# Languages' own libraries, without which programs do not run: a task whose solution is
# there is not proven.
_CORES = (sysconfig.get_path("stdlib"), "/usr/lib/python3.", "/usr/share/perl/")


def secrets(folder: records.Folder, record: records.Record) -> records.Files:
    """Returns the files of the solution and of the tests that an agent does not have.

    Args:
        folder: of the task.
        record: the task.
    """
    given = folder.agent_tree(record)
    secret = {**folder.solved_tree(record), **folder.hidden_tree(record)}
    known = {*given.values(), b""}
    return {path: text for path, text in secret.items() if text not in known}


def on_host(files: records.Files) -> tuple[pathlib.Path, ...]:
    """Returns what to hide of /usr, so that no other copy of files can be read.

    Args:
        files: by path in their package. What counts as a copy is the folder of another
            package in which a file has the same name and is in a folder of the same
            name, or a file with the same name and content.
    """
    found = {pathlib.Path(path) for name in files for path in _copies(name, files)}
    return tuple(sorted(p for p in found if not any(q in found for q in p.parents)))


def _copies(name: str, files: records.Files) -> Iterator[str]:
    parts = name.split("/")
    for other in _paths().get(parts[-1], ()):
        theirs = other.split("/")
        same = 0
        while same < len(parts) and parts[-same - 1] == theirs[-same - 1]:
            same += 1
        if same > 1:
            yield "/".join(theirs[: len(theirs) - same + 1])
        elif _digest(other) == hashlib.sha256(files[name]).hexdigest():
            yield other


@functools.cache
def _paths() -> Mapping[str, list[str]]:
    """Returns the files below /usr by their names."""
    found: dict[str, list[str]] = {}
    for here, _, names in os.walk(_ROOT):
        if not f"{here}/".startswith(_CORES) or "-packages" in here:
            for name in names:
                found.setdefault(name, []).append(f"{here}/{name}")
    return found


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:  # a link to nowhere, or a file that root alone reads
        return ""
