"""Finds what an agent must not read: the solution, the tests, and copies on the host.

A box sees /usr and the folder of a test runner. Programs there bring packages of their
own along, perhaps the very one that a task is about, in this release or another; pip's
lie in a wheel.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import sysconfig
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from glm5_jax.environments.worlds.swe import records

USR = pathlib.Path("/usr")
# Folders of these names are in many packages.
_COMMON = frozenset(("bin", "dist", "include", "lib", "src", "t", "test", "tests"))
_ARCHIVES = (".jar", ".whl", ".egg", ".zip")
# Broken ones, and those with a password or packed in a way that Python does not know.
_UNREADABLE = (OSError, zipfile.BadZipFile, zlib.error, RuntimeError)
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
            name, or a file with the same name and content; or an archive with either.
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
        if same := _same(parts, theirs):
            yield "/".join(theirs[: len(theirs) - same + 1])
        elif _digest(other) == digest:
            yield other
    for archive, other in _members(root).get(parts[-1], ()):
        if _same(parts, other.split("/")) or _digest_in(archive, other) == digest:
            yield archive
    if name.endswith(".java"):  # compiled, whatever the folder is called
        parts[-1] = parts[-1].removesuffix(".java") + ".class"
        for archive, other in _members(root).get(parts[-1], ()):
            if other.split("/")[-2:] == parts[-2:]:
                yield archive


def _same(parts: Sequence[str], theirs: Sequence[str]) -> int:
    """Returns how many names at the ends agree; 0 if they do not tell a package."""
    same = 0
    while same < min(len(parts), len(theirs)) and parts[~same] == theirs[~same]:
        same += 1
    return same if same > 1 and parts[-same] not in _COMMON else 0


@functools.cache
def _paths(root: pathlib.Path) -> Mapping[str, list[str]]:
    """Returns the files below a folder by their names; of cores, archives alone."""
    found: dict[str, list[str]] = {}
    for here, _, names in os.walk(root):
        is_core = f"{here}/".startswith(_CORES) and "-packages" not in here
        for name in names:
            if not is_core or name.endswith(_ARCHIVES):
                found.setdefault(name, []).append(f"{here}/{name}")
    return found


@functools.cache
def _members(root: pathlib.Path) -> Mapping[str, list[tuple[str, str]]]:
    """Returns the archives below a folder, each with a file in it, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    paths = [path for paths in _paths(root).values() for path in paths]
    for path in paths:
        if path.endswith(_ARCHIVES) and not os.path.islink(path):
            with contextlib.suppress(*_UNREADABLE), zipfile.ZipFile(path) as opened:
                for inside in opened.namelist():
                    name = inside.rpartition("/")[2]
                    found.setdefault(name, []).append((path, inside))
    return found


@functools.cache
def _digest_in(archive: str, inside: str) -> str:
    try:
        with zipfile.ZipFile(archive) as opened:
            return hashlib.sha256(opened.read(inside)).hexdigest()
    except _UNREADABLE:
        return ""


@functools.cache
def _digest(path: str) -> str:
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:  # a link to nowhere, or a file that root alone reads
        return ""
