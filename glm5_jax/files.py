"""Files that can be made again: read if whole, else made and put in place at once."""

import os
import pathlib
import tempfile
import zipfile
from collections.abc import Callable
from typing import TypeVar

from absl import logging

_T = TypeVar("_T")
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def cached(
    path: pathlib.Path,
    *,
    make: Callable[[], _T],
    load: Callable[[pathlib.Path], _T],
    save: Callable[[_T, pathlib.Path], None],
) -> _T:
    """Returns what the file at `path` holds, making it first where it must.

    A damaged file is made anew. A folder that cannot be written costs the time of
    making it again, not the run.
    """
    if path.exists():
        try:
            return load(path)
        except _DAMAGE as error:
            logging.warning("%s is damaged and is made anew: %s", path, error)
    value = make()
    try:
        write_atomically(path, lambda temporary: save(value, temporary))
    except OSError as error:
        logging.warning("%s cannot be kept for the next run: %s", path, error)
    return value


def write_atomically(
    path: pathlib.Path, write: Callable[[pathlib.Path], object]
) -> None:
    """Lets `write` fill a new file beside `path`, then moves it there.

    Who reads `path` meanwhile, or after a crash, finds the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: np.savez appends its own to any other name.
    handle, name = tempfile.mkstemp(path.suffix, f".{path.stem}-", path.parent)
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's files are for their owner alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    write_atomically(path, lambda new: _write_text(new, text))


def _write_text(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
