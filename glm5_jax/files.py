"""Files written atomically, and cached files that can be made again."""

import contextlib
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
    """Returns the content of the file at `path`, which is made first if missing.

    A damaged file is made again. If the folder cannot be written, the next run makes
    the content again.
    """
    if path.exists():
        try:
            return load(path)
        except _DAMAGE as error:
            logging.warning("%s is damaged and is made again: %s", path, error)
    value = make()
    try:
        write_atomically(path, lambda temporary: save(value, temporary))
    except OSError as error:
        logging.warning("%s cannot be kept for the next run: %s", path, error)
    return value


def write_atomically(
    path: pathlib.Path, write: Callable[[pathlib.Path], object]
) -> None:
    """Lets `write` fill a temporary file beside `path`, syncs it and renames it.

    Readers find the old file or the new one, also after a crash or a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keeps the suffix: np.savez appends its own to any other name.
    handle, name = tempfile.mkstemp(path.suffix, f".{path.stem}-", path.parent)
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp's files are readable only by their owner
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file atomically."""
    write_atomically(path, lambda new: _write_text(new, text))


def sync_folder(folder: str | os.PathLike) -> None:
    """Syncs a folder, so that names in it survive a power cut, where possible."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_text(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
