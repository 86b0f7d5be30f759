"""Reads and writes the files of token ids of generate and evaluate."""

import pathlib

import numpy as np
from jaxtyping import Int

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
    """Writes rows of ids, padded to one length; a single row as [T]."""
    length = max(map(len, rows))
    padded = [row + [padding] * (length - len(row)) for row in rows]
    out = np.asarray(padded[0] if is_single else padded, np.int32)
    with open(path, "wb") as file:  # np.save would append .npy to a name
        np.save(file, out)


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
