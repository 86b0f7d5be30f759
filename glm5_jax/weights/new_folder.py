"""Creates a folder that appears complete or not at all."""

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from absl import logging

from glm5_jax import config as config_lib

_LOCK = ".being_written"  # flock of the writer; the kernel frees it when it dies
_SUFFIX = r"\.partial-[a-z0-9_]{8}"  # mkdtemp's


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a temporary folder, which is renamed to `folder` at the end.

    An exception, such as a full disk, removes the temporary folder. A killed process
    leaves it as FOLDER.partial-*; the next writer of the same folder deletes it.

    Raises:
      InputError: the folder exists, cannot be made, or another process is writing it.
    """
    folder = pathlib.Path(os.path.expanduser(folder)).absolute()
    if folder.exists():
        raise config_lib.InputError(f"{folder} exists; choose another target.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_those_of_the_dead(folder)
        partial, lock = _make_partial(folder)
    except OSError as error:
        raise config_lib.InputError(
            f"cannot write {folder}: {error.strerror}; choose another target."
        ) from error
    with lock:
        try:
            yield partial
            (partial / _LOCK).unlink()
            partial.chmod(0o755)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def require_space(folder: pathlib.Path, needed: int) -> None:
    """Checks that a disk has room for a long write.

    Raises:
      InputError: the disk has fewer bytes free.
    """
    if (free := shutil.disk_usage(folder).free) < needed:
        raise config_lib.InputError(
            f"{folder.parent} has {free:,} bytes free, but the tensors take "
            f"{needed:,}; free some space or choose another target."
        )


def _make_partial(folder: pathlib.Path) -> tuple[pathlib.Path, BinaryIO]:
    while True:
        prefix = f"{folder.name}.partial-"
        partial = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        lock = (partial / _LOCK).open("xb")
        with contextlib.suppress(OSError):  # on file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (partial / _LOCK).exists():  # not deleted before it was locked
            return partial, lock
        lock.close()


def _remove_those_of_the_dead(folder: pathlib.Path) -> None:
    """Removes the partial folders of killed processes.

    Raises:
      InputError: a running process is writing the folder.
    """
    name = re.compile(re.escape(folder.name) + _SUFFIX)
    for partial in sorted(folder.parent.iterdir()):
        if not name.fullmatch(partial.name):
            continue
        try:
            with (partial / _LOCK).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial)
        except BlockingIOError as error:
            raise config_lib.InputError(
                f"another process is writing {folder} (as {partial.name}); wait for it "
                f"or choose another target."
            ) from error
        except OSError:  # no lock: from an earlier version, or not ours
            logging.warning("Delete %s if no process is writing into it.", partial)
        else:
            logging.warning("Removed %s, which a killed process left behind.", partial)
