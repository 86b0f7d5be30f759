"""A new folder in a bucket, which is written on this machine's disk first."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.processes import folder_lock
from glm5_jax.storage import bucket as bucket_lib
from glm5_jax.storage import copies

_LAST = "config.json"  # without it no reader takes the folder for a model


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields where to make a folder; if it is for a bucket, uploads it at the end.

    Args:
      path: a path, which is yielded with a leading ~ resolved, or an address with
        nothing below it.

    Raises:
      InputError: there is something at the address, another process on this machine
        writes there, or the bucket refuses; what went up is deleted again. Or the
        address is of another kind of store.
    """
    bucket_lib.require_path(path)
    if not bucket_lib.is_address(path):
        yield pathlib.Path(os.path.expanduser(path))
        return
    bucket = bucket_lib.Bucket(path)
    if bucket.objects():
        raise config_lib.InputError(f"{bucket.address} exists; choose another target.")
    state = copies.home() / "new" / bucket.local_name
    state.mkdir(parents=True, exist_ok=True)
    with folder_lock.held(state):
        place = state / "folder"
        shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
        try:
            yield place
            _upload(bucket, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _upload(bucket: bucket_lib.Bucket, place: pathlib.Path) -> None:
    paths = [path for path in place.rglob("*") if path.is_file()]
    names = sorted(path.relative_to(place).as_posix() for path in paths)
    size = sum(path.stat().st_size for path in paths)
    logging.info(
        "Uploading %d files, %.3f GiB, to %s.", len(names), size / 2**30, bucket.address
    )

    def put(name: str) -> None:
        bucket.upload(place / name, name)

    try:
        copies.in_parallel(put, [n for n in names if n != _LAST], "uploaded")
        copies.in_parallel(put, [n for n in names if n == _LAST], "uploaded")
    except BaseException:
        with contextlib.suppress(config_lib.InputError):  # the first error counts
            for name in names:
                bucket.delete(name)
        raise
