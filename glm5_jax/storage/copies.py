"""Copies of folders in buckets on this machine's disk, for readers of files.

A copy is made at the first use and kept in `home()`; later uses fetch what has changed.
Whoever reads it finds plain files, which it may map and read in any order.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures
from typing import Any

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.storage import bucket as bucket_lib

VARIABLE = "GLM5_JAX_BUCKETS"
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"  # last file of a checkpoint
INDEX = ".fetched.json"  # what a copy was made of
_STEP = re.compile(r"(?P<run>.+)/checkpoints/(?P<number>\d+)")
_THREADS = 8
_TRIES = 3
_SHOW_SECONDS = 30
_READ: dict[pathlib.Path, int] = {}  # descriptors of copies that this process reads


def home() -> pathlib.Path:
    """Returns the folder of copies, $GLM5_JAX_BUCKETS or ~/.cache/glm5_jax/buckets."""
    default = "~/.cache/glm5_jax/buckets"
    return pathlib.Path(os.environ.get(VARIABLE, default)).expanduser()


def local(path: str | os.PathLike) -> pathlib.Path:
    """Returns a path of this machine: of the copy, if the given one is in a bucket.

    Args:
      path: a file or folder here, or an address. Of a run only the newest sealed
        checkpoint is copied; RUN/checkpoints/STEP names another one.

    Raises:
      InputError: there is nothing at the address, the bucket refuses, or the
        connection broke; the next call resumes.
      OSError: the disk is full.
    """
    if bucket_lib.is_address(path):
        return _copied(bucket_lib.Bucket(path).address)
    return pathlib.Path(os.path.expanduser(path))  # ~NOBODY stays as it is


@functools.cache  # one reader sees one state
def _copied(address: str) -> pathlib.Path:
    for _ in range(_TRIES):  # a run that goes on deletes old checkpoints meanwhile
        with contextlib.suppress(FileNotFoundError):
            return _copied_now(address)
    raise config_lib.InputError(f"{address} changes while it is copied; try again.")


def _copied_now(address: str) -> pathlib.Path:
    step = _STEP.fullmatch(address)
    bucket = bucket_lib.Bucket(step["run"] if step else address)
    stored = bucket.objects()
    folder = _place(address) / bucket.local_name.name
    if step:
        parts = CHECKPOINTS, step["number"]
        below = "/".join(parts) + "/"
        is_there = "config.json" in stored and any(n.startswith(below) for n in stored)
        stored = {
            name: entry
            for name, entry in stored.items()
            if is_there and ("/" not in name or name.startswith(below))
        }
        place = folder.joinpath(*parts)
    elif "" in stored:  # a file
        stored, place = {"": stored[""]}, folder
    else:
        stored, place = newest_step(stored), folder
    if not stored:
        raise config_lib.InputError(f"there is nothing at {address}.")
    fetch(bucket, stored, folder)
    return place


def _place(address: str) -> pathlib.Path:
    """Returns a folder for one address alone: those of two may lie in each other."""
    return home() / "copies" / hashlib.sha256(address.encode()).hexdigest()[:12]


def newest_step(
    stored: dict[str, bucket_lib.Stored],
) -> dict[str, bucket_lib.Stored]:
    """Leaves out every checkpoint but the newest sealed one of each run.

    A run has a config.json; other folders may have any names.
    """
    steps = {s for s in map(step_of, stored) if s is not None and _is_run(s[0], stored)}
    newest = {max(of_run) for of_run in by_run(sealed(stored) & steps)}
    if len(steps) > len(newest):
        logging.warning(
            "Of %d checkpoints, the newest with a manifest is copied: %s.",
            len(steps),
            ", ".join(f"step {number}" for _, number in sorted(newest)) or "none",
        )
    others = steps - newest
    return {n: entry for n, entry in stored.items() if step_of(n) not in others}


def _is_run(folder: str, names: Collection[str]) -> bool:
    return f"{folder}/config.json".lstrip("/") in names


def sealed(names: Iterable[str]) -> set[tuple[str, int]]:
    """Returns the checkpoints that have a manifest, as `step_of` names them."""
    return {
        step
        for name in names
        if name.endswith(f"/{MANIFEST}") and (step := step_of(name)) is not None
    }


def step_of(name: str) -> tuple[str, int] | None:
    """Returns the run's folder and the step of a checkpoint's file, else None."""
    parts = name.split("/")
    for i, part in enumerate(parts[:-2]):
        if part == CHECKPOINTS:
            number = parts[i + 1]
            return ("/".join(parts[:i]), int(number)) if number.isdecimal() else None
    return None


def by_run(steps: set[tuple[str, int]]) -> list[set[tuple[str, int]]]:
    """Returns the steps of each run."""
    runs = {run for run, _ in steps}
    return [{step for step in steps if step[0] == run} for run in sorted(runs)]


def fetch(
    bucket: bucket_lib.Bucket,
    stored: dict[str, bucket_lib.Stored],
    place: pathlib.Path,
) -> None:
    """Makes a folder, or file, hold these objects and nothing else.

    Other processes that fetch to the same place wait. What is there already and has
    not changed is not fetched again; a copy that others read is not changed.

    Raises:
      InputError: the bucket refuses, the connection broke, the disk is too small, or
        an object has no name of a file.
    """
    _require_names(bucket, stored)
    index = place / INDEX if "" not in stored else place.with_name(f".{place.name}")
    index.parent.mkdir(parents=True, exist_ok=True)
    with _locked(index.with_suffix(".lock")):
        known = _read(index)
        todo = {
            name: entry
            for name, entry in stored.items()
            if known.get(name) != [entry.size, entry.version]
            or not _has_size(place / name, entry.size)
        }
        if todo or known.keys() - stored.keys():
            _require_unread(index.with_suffix(".readers"), place)
        try:
            _get(bucket, todo, place, known)
        finally:  # the next call resumes
            kept = {name: known[name] for name in stored if name in known}
            files.write_text(index, json.dumps(kept))
        if "" not in stored:
            _remove_others(place, stored)
        _note_reader(index.with_suffix(".readers"))


def _get(
    bucket: bucket_lib.Bucket,
    todo: dict[str, bucket_lib.Stored],
    place: pathlib.Path,
    known: dict[str, list],
) -> None:
    """Copies objects, and notes each in `known`."""
    size = sum(entry.size for entry in todo.values())
    if size > (free := shutil.disk_usage(place.parent).free):
        raise config_lib.InputError(
            f"{bucket.address} has {size:,} bytes to copy, but only {free:,} are free "
            f"on the disk of {place}; set {VARIABLE} to a larger one."
        )
    if todo:
        logging.info(
            "Copying %d files, %.3f GiB, of %s to %s.",
            len(todo),
            size / 2**30,
            bucket.address,
            place,
        )

    def get(name: str) -> None:
        bucket.download(name, place / name)
        os.utime(place / name, (todo[name].modified,) * 2)  # the same anywhere
        known[name] = [todo[name].size, todo[name].version]

    in_parallel(get, list(todo), "copied")


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    with contextlib.closing(path.open("a")) as file:
        _lock(file.fileno(), path, fcntl.LOCK_EX)
        yield


def _lock(descriptor: int, path: pathlib.Path, how: int) -> None:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        raise
    except OSError as error:  # a file system without locks
        logging.warning("%s cannot be locked: %s.", path, error.strerror)


def _require_unread(path: pathlib.Path, place: pathlib.Path) -> None:
    """Checks that no other process reads the copy, which is about to change."""
    if path in _READ:
        os.close(_READ.pop(path))
    with contextlib.closing(path.open("a")) as file:
        try:
            _lock(file.fileno(), path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise config_lib.InputError(
                f"another process reads {place}, and the bucket has changed since; "
                f"wait for it, or set {VARIABLE} to another folder."
            ) from error


def _note_reader(path: pathlib.Path) -> None:
    """Holds a lock until this process ends."""
    if path not in _READ:
        _READ[path] = os.open(path, os.O_CREAT | os.O_WRONLY)
        _lock(_READ[path], path, fcntl.LOCK_SH)


def in_parallel(work: Callable[[str], Any], names: list[str], done: str) -> None:
    """Calls `work` with each name, some at a time, and logs the progress."""
    shown, count = time.monotonic(), 0
    pool = futures.ThreadPoolExecutor(_THREADS, "bucket")
    try:
        for future in futures.as_completed([pool.submit(work, n) for n in names]):
            future.result()
            count += 1
            if time.monotonic() > shown + _SHOW_SECONDS:
                shown = time.monotonic()
                logging.info("%d of %d files %s.", count, len(names), done)
    finally:
        pool.shutdown(cancel_futures=True)


def _require_names(bucket: bucket_lib.Bucket, names: Iterable[str]) -> None:
    """Checks that every object has a place inside of the folder."""
    for name in names:
        if name and not all(part not in ("", ".", "..") for part in name.split("/")):
            raise config_lib.InputError(
                f"{bucket.address}/{name} cannot be a file: the name has an empty "
                f"part, or . or .. as one. Rename the object."
            )


def _read(index: pathlib.Path) -> dict[str, list]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _has_size(path: pathlib.Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _remove_others(place: pathlib.Path, names: Iterable[str]) -> None:
    """Removes files that the bucket no longer has, and folders left empty."""
    index = place / INDEX
    kept = {place / name for name in names} | {index}
    kept |= {index.with_suffix(suffix) for suffix in (".lock", ".readers")}
    for path in sorted(place.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in kept:
            path.unlink()
