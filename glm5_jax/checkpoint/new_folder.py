"""A folder that appears whole or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from glm5_jax import config as config_lib


@contextlib.contextmanager
def new_folder(folder: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Gives a temporary folder beside it, which becomes `folder` at the end.

    An exception, a full disk for example, removes it; a killed process leaves it under
    a name that begins with the folder's.

    Raises:
      InputError: the folder exists, or cannot be made.
    """
    folder = pathlib.Path(folder).absolute()
    if folder.exists():
        raise config_lib.InputError(f"{folder} exists; choose another target.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{folder.name}.partial-"
        partial = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    except OSError as error:
        raise config_lib.InputError(
            f"cannot write {folder}: {error.strerror}; choose another target."
        ) from error
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def require_space(folder: pathlib.Path, needed: int) -> None:
    """Looks before a long write whether its end will fit.

    Raises:
      InputError: the disk has fewer bytes free.
    """
    if (free := shutil.disk_usage(folder).free) < needed:
        raise config_lib.InputError(
            f"{folder.parent} has {free:,} bytes free, the tensors take {needed:,}; "
            f"choose another target."
        )
