"""Reads and writes the files of generate and evaluate: token ids, and logits."""

import contextlib
import errno
import io
import os
import pathlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from glm5_jax import config as config_lib


def read_ids(path: str) -> Int[np.ndarray, "*n T"]:
    """Reads token ids of an .npy file, [T] or [N, T].

    Raises:
      InputError: the file cannot be read, or holds something else.
    """
    try:
        # Mapped, so that a header with too large a shape takes no memory.
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise config_lib.InputError(
            f"Token ids cannot be read from {path}: {error}. Write integers with "
            f"numpy.save."
        ) from error
    is_array = isinstance(ids, np.ndarray) and np.issubdtype(ids.dtype, np.integer)
    if not (is_array and ids.ndim in (1, 2) and ids.size):
        shown = f"{ids.dtype}{list(ids.shape)}" if hasattr(ids, "shape") else "an .npz"
        raise config_lib.InputError(
            f"{path} must hold integers of shape [T] or [N, T], got {shown}."
        )
    return np.array(ids)


def save_rows(path: str, rows: list[list[int]], padding: int, is_single: bool) -> None:
    """Writes rows of ids, padded to one length; a single row as [T].

    Raises:
      OSError: the disk is full; what was written is deleted.
    """
    length = max(map(len, rows))
    padded = [row + [padding] * (length - len(row)) for row in rows]
    out = np.asarray(padded[0] if is_single else padded, np.int32)
    with _written(path) as file:  # np.save would append .npy to a name
        np.save(file, out)


def room_for_logits(path: str, shape: tuple[int, ...]) -> Float[np.ndarray, "*n"]:
    """Returns an array that is a file, of which the disk has all blocks already.

    Without them, a write to the array would end the process with SIGBUS.

    Raises:
      OSError: the disk has too little room.
    """
    with _written(path) as file:
        logits = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        if hasattr(os, "posix_fallocate"):  # macOS has none
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return logits


@contextlib.contextmanager
def _written(path: str) -> Iterator[io.FileIO]:
    """Opens a file to write; deletes what a full disk made of it, and says so."""
    with open(path, "wb", buffering=0) as file:  # so that closing it writes nothing
        try:
            yield file
        except OSError as error:
            if pathlib.Path(path).is_file():  # no device, such as /dev/full
                os.unlink(path)
            code = error.errno or errno.ENOSPC  # numpy's own errors have none
            why = error.strerror or error
            raise OSError(code, f"{path} cannot be written ({why})") from error


def require_folder_of(path: str | None) -> None:
    """Checks that a result can be written, before it is computed.

    Raises:
      InputError: its folder is missing, or it is one.
    """
    if path is None:
        return
    if not pathlib.Path(path).absolute().parent.is_dir():
        raise config_lib.InputError(f"The folder of {path} does not exist; make it.")
    if pathlib.Path(path).is_dir():
        raise config_lib.InputError(f"{path} is a folder; give the name of a file.")
