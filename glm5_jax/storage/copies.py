"""Copies of folders in buckets on this machine's disk, for readers of files.

A copy is made at the first use and kept in `home()`; later uses fetch what has changed.
Whoever reads it finds plain files, which it may map and read in any order.
"""

import fcntl
import functools
import json
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterable
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
_SHOW_SECONDS = 30


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
    return pathlib.Path(path).expanduser()


@functools.cache  # one reader sees one state
def _copied(address: str) -> pathlib.Path:
    if step := _STEP.fullmatch(address):
        return _copied_step(step["run"], int(step["number"]))
    bucket = bucket_lib.Bucket(address)
    stored = bucket.objects()
    place = home() / "copies" / bucket.local_name
    if "" in stored:  # a file
        stored = {"": stored[""]}
    _fetch_some(bucket, newest_step(stored), place)
    return place


def _copied_step(run: str, number: int) -> pathlib.Path:
    """Copies a run's small files and one of its checkpoints; returns its folder."""
    bucket = bucket_lib.Bucket(run)
    step = CHECKPOINTS, str(number)
    stored = {
        name: entry
        for name, entry in bucket.objects().items()
        if (parts := tuple(name.split("/")))[0] != CHECKPOINTS or parts[:2] == step
    }
    folder = bucket.local_name
    place = home() / "copies" / folder.with_name(f"{folder.name}.{number}")
    if not any(name.startswith("/".join(step)) for name in stored):
        stored = {}
    _fetch_some(bucket, stored, place)
    return place.joinpath(*step)


def _fetch_some(
    bucket: bucket_lib.Bucket,
    stored: dict[str, bucket_lib.Stored],
    place: pathlib.Path,
) -> None:
    if not stored:
        raise config_lib.InputError(f"there is nothing at {bucket.address}.")
    fetch(bucket, stored, place)


def newest_step(
    stored: dict[str, bucket_lib.Stored],
) -> dict[str, bucket_lib.Stored]:
    """Leaves out every checkpoint but the newest sealed one of each run."""
    steps = sealed(stored)
    newest = {max(of_run) for of_run in by_run(steps)}
    return {
        name: entry
        for name, entry in stored.items()
        if (step := step_of(name)) is None or step in newest
    }


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
    not changed is not fetched again.

    Raises:
      InputError: the bucket refuses, the connection broke, the disk is too small, or
        an object has no name of a file.
    """
    _require_names(bucket, stored)
    index = place / INDEX if "" not in stored else place.with_name(f".{place.name}")
    index.parent.mkdir(parents=True, exist_ok=True)
    with index.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _read(index)
        todo = {
            name: entry
            for name, entry in stored.items()
            if known.get(name) != [entry.size, entry.version]
            or not _has_size(place / name, entry.size)
        }
        size = sum(entry.size for entry in todo.values())
        if size > (free := shutil.disk_usage(index.parent).free):
            raise config_lib.InputError(
                f"{bucket.address} has {size:,} bytes to copy, but only {free:,} are "
                f"free on the disk of {place}; set {VARIABLE} to a larger one."
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
            if (modified := stored[name].modified) is not None:  # the same anywhere
                os.utime(place / name, (modified, modified))
            known[name] = [stored[name].size, stored[name].version]

        try:
            in_parallel(get, list(todo), "copied")
        finally:
            kept = {name: known[name] for name in stored if name in known}
            files.write_text(index, json.dumps(kept))
        if "" not in stored:
            _remove_others(place, stored)


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
    kept = {place / name for name in names} | {place / INDEX}
    kept.add((place / INDEX).with_suffix(".lock"))
    for path in sorted(place.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path not in kept:
            path.unlink()
