"""Locks a run's folder, so that one process at a time writes it. Imports no jax.

The operating system (flock) releases the lock of a killed process. The locked file,
RUN/.lock, names its owner.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import TextIO

from absl import logging

from glm5_jax import config as config_lib

NAME = ".lock"


@contextlib.contextmanager
def held(folder: str | os.PathLike) -> Iterator[None]:
    """Locks an existing folder until the block ends.

    On a file system without locks, it warns and locks nothing.

    Raises:
      InputError: another process holds the lock, or the folder is not writable.
    """
    path = pathlib.Path(folder).expanduser().absolute() / NAME
    file = _locked(path)
    with file:
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield
        finally:
            path.unlink(missing_ok=True)  # before the lock is released


def _locked(path: pathlib.Path) -> TextIO:
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise config_lib.InputError(
                f"cannot write into {path.parent}: {error.strerror}; give a folder in "
                f"which you may create files."
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with file:
                file.seek(0)
                owner = file.read(200) or "another process"
            raise config_lib.InputError(
                f"{owner} writes into {path.parent}; wait for it, end it, or give "
                f"another folder."
            ) from error
        except OSError as error:
            logging.warning("%s cannot be locked: %s.", path, error.strerror)
            return file
        if _is_at(path, file):  # else its last owner has deleted the file meanwhile
            return file
        file.close()


def _is_at(path: pathlib.Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
