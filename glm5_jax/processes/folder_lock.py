"""One process at a time writes a run's folder. Imports no jax.

The lock is the system's (flock), which takes it from the dead: a killed process keeps
nobody out. RUN/.lock, which holds it, says who has it.
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
    """Keeps other processes out of a folder, which must exist, until the block ends.

    On a file system without locks it warns, and keeps nobody out.

    Raises:
      InputError: another process is in it, or nothing can be written there.
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
            path.unlink(missing_ok=True)  # while it is still held


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
        if _is_at(path, file):  # else who had it took the name away meanwhile
            return file
        file.close()


def _is_at(path: pathlib.Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
