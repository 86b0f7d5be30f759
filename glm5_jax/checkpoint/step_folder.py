"""Names and contents of the folders in a run's checkpoints/.

STEP/ holds params/ (the parameters), state/ (the other arrays), metadata/ (JSON) and
manifest.json. Steps from before manifests hold the parameters in state/. Folders
renamed to STEP.damaged, STEP.abandoned or STEP.deleting are set aside: no longer steps.
"""

import contextlib
import json
import os
import shutil

from etils import epath

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manifest
from glm5_jax.config import checks

PARAMS, STATE, METADATA = "params", "state", "metadata"
DAMAGED = "damaged"  # kept until pruned
ABANDONED = "abandoned"  # by a rollback; deleted by the next save
DELETING = "deleting"
REASONS = (DAMAGED, ABANDONED, DELETING)
_MARK = "_CHECKPOINT_METADATA"  # Orbax writes it into every step


def absolute(folder: epath.PathLike) -> epath.Path:
    """Returns an absolute path, as Orbax needs it.

    Raises:
      InputError: the path is in an object store, which cannot rename or sync.
    """
    checks.require_local(str(folder))
    return epath.Path(folder).expanduser().absolute()


def numbers(checkpoints: epath.Path) -> list[int]:
    """Returns the steps that have a folder, valid or not, in order."""
    found = [manifest.number_of(path.name) for path in _folders(checkpoints)]
    return sorted(number for number in found if number is not None)


def strangers(checkpoints: epath.Path) -> list[str]:
    """Returns names of folders that look like steps but are none, such as 007."""
    return sorted(
        path.name
        for path in _folders(checkpoints)
        if path.name.isdecimal() and manifest.number_of(path.name) is None
    )


def by_trust(checkpoints: epath.Path) -> list[int]:
    """Returns steps in the order in which to try them.

    Steps with a manifest come before steps without one, each newest first. Steps that
    lack a part come first of all, so that they fail at once and are reported.
    """

    def trust(step: int) -> tuple[bool, bool, int]:
        folder = checkpoints / str(step)
        return bool(missing(folder)), manifest.is_sealed(folder), step

    return sorted(numbers(checkpoints), key=trust)


def find(folder: epath.PathLike) -> epath.Path:
    """Returns a step folder itself, or the newest complete one of a run folder.

    Raises:
      InputError: there is no step.
    """
    path = absolute(folder)
    if not missing(path):
        return path
    for parent in (path / "checkpoints", path):
        for step in reversed(by_trust(parent)):
            if not missing(parent / str(step)):
                return parent / str(step)
    raise config_lib.InputError(
        f"there is no checkpoint in {path}: it is neither a step folder (with params/ "
        f"and metadata/) nor a run folder (with checkpoints/STEP/)."
    )


def missing(folder: epath.Path) -> str:
    """Names the parts that a step folder lacks; empty for a complete one."""
    if not any((folder / part / "_METADATA").exists() for part in (PARAMS, STATE)):
        return f"{PARAMS}/_METADATA"
    for name in (f"{METADATA}/metadata", _MARK):
        if not (folder / name).exists():
            return name
    return ""


def is_whole(folder: epath.PathLike, step: int) -> bool:
    """Returns whether a run folder has a complete step, all files with their sizes.

    Args:
        folder: of the run.
        step: number of the step.
    """
    path = absolute(folder) / "checkpoints" / str(step)
    try:
        is_there = manifest.is_sealed(path) and not missing(path)
        if is_there:
            manifest.verify(path)
            require_number(path)
    except config_lib.DamagedError:
        return False
    return is_there


def require_number(folder: epath.Path) -> None:
    """Checks that a step's metadata have the number in its folder's name.

    Raises:
      DamagedError: they have another number, or cannot be read.
    """
    path = folder / METADATA / "metadata"
    try:
        metadata = json.loads(path.read_text())
        step = metadata.get("step")
        position = metadata.get("position", step)
        is_ahead = step is None or position >= step
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise config_lib.DamagedError(f"{path} cannot be read: {error!r}.") from error
    manifest.require_number(folder, step)
    if not is_ahead:
        raise config_lib.DamagedError(
            f"{path} says that {position} batches were drawn for {step} steps."
        )


def set_aside(folder: epath.Path, why: str) -> epath.Path:
    """Renames a step folder so that it is no step; returns its new path."""
    target = folder.parent / f"{folder.name}.{why}"
    count = 1
    while target.exists():
        count += 1
        target = folder.parent / f"{folder.name}.{why}.{count}"
    return folder.rename(target)


def all_set_aside(checkpoints: epath.Path, why: str) -> list[epath.Path]:
    """Returns the folders that were set aside for this reason."""
    paths = _folders(checkpoints)
    return sorted(path for path in paths if path.name.split(".")[1:2] == [why])


def remove(folder: epath.Path) -> None:
    """Deletes a folder or link; a partly deleted one is never taken for a step."""
    if folder.name.isdecimal():
        folder = set_aside(folder, DELETING)
    if os.path.islink(folder):
        folder.unlink()
        return
    # A mounted bucket drops a folder with its last file, while rmtree walks it.
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)  # raises the reason


def free_bytes(folder: epath.Path) -> int:
    """Returns the free bytes of the disk."""
    return shutil.disk_usage(folder).free


def _folders(checkpoints: epath.Path) -> list[epath.Path]:
    if not checkpoints.is_dir():
        return []
    return [path for path in checkpoints.iterdir() if path.is_dir()]
