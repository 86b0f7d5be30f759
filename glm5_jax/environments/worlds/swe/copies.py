"""Finds what an agent must not read: the solution, the tests, and copies on the host.

A box sees /usr and the folder of a test runner. Programs there bring packages of their
own along, perhaps the very one that a task is about, in this release or another.
"""

import functools
import hashlib
import os
import pathlib
import sysconfig
import zipfile
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
    digests = ((k, hashlib.sha256(v).hexdigest()) for k, v in files.items())
    return _on_host(frozenset(digests), tuple(roots))


@functools.lru_cache(maxsize=64)  # every episode of a task asks
def _on_host(
    digests: frozenset[tuple[str, str]], roots: tuple[pathlib.Path, ...]
) -> tuple[pathlib.Path, ...]:
    found = {
        pathlib.Path(path)
        for root in roots
        for name, digest in digests
        for path in _copies(root, name, digest)
    }
    return outermost(found)


def outermost(paths: Collection[pathlib.Path]) -> tuple[pathlib.Path, ...]:
    """Returns the paths that are below none of the others, sorted."""
    return tuple(sorted(p for p in paths if not any(q in paths for q in p.parents)))


def _copies(root: pathlib.Path, name: str, digest: str) -> Iterator[str]:
    parts = name.split("/")
    for other in _paths(root).get(parts[-1], ()):
        theirs = other.split("/")
        same = 0
        while same < len(parts) and parts[-same - 1] == theirs[-same - 1]:
            same += 1
        if same > 1 and parts[-same] not in _COMMON:
            yield "/".join(theirs[: len(theirs) - same + 1])
        elif _digest(other) == digest:
            yield other
    if name.endswith(".java"):
        yield from _jars(root).get("/".join(parts[-2:])[: -len(".java")], ())


@functools.cache
def _paths(root: pathlib.Path) -> Mapping[str, list[str]]:
    """Returns the files below a folder by their names."""
    found: dict[str, list[str]] = {}
    for here, _, names in os.walk(root):
        if not f"{here}/".startswith(_CORES) or "-packages" in here:
            for name in names:
                found.setdefault(name, []).append(f"{here}/{name}")
    return found


@functools.cache
def _jars(root: pathlib.Path) -> Mapping[str, list[str]]:
    """Returns the archives of compiled Java by their classes, as "FOLDER/NAME"."""
    found: dict[str, list[str]] = {}
    jars = [path for paths in _paths(root).values() for path in paths]
    for jar in jars:
        if jar.endswith(".jar") and not os.path.islink(jar) and zipfile.is_zipfile(jar):
            with zipfile.ZipFile(jar) as opened:
                for name in opened.namelist():
                    if name.endswith(".class"):
                        key = "/".join(name.split("/")[-2:]).removesuffix(".class")
                        found.setdefault(key, []).append(jar)
    return found


@functools.cache
def _digest(path: str) -> str:
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:  # a link to nowhere, or a file that root alone reads
        return ""
