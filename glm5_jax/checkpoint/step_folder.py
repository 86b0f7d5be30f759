"""What lies in a run's checkpoints/: a folder a step, and what was set aside.

STEP/ holds params/ and state/ (arrays: the parameters; all else of the state),
metadata/ (JSON) and manifest.json. Steps written before there were manifests hold the
parameters in state/. What is renamed to STEP.damaged, STEP.abandoned or STEP.deleting
counts no more.
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
DAMAGED = "damaged"  # kept until somebody prunes it
ABANDONED = "abandoned"  # of a branch that was rolled back; goes with the next save
DELETING = "deleting"
REASONS = (DAMAGED, ABANDONED, DELETING)
_MARK = "_CHECKPOINT_METADATA"  # Orbax writes it into every step


def absolute(folder: epath.PathLike) -> epath.Path:
    """The path as Orbax takes it.

    Raises:
      InputError: it is in an object store, where nothing can be renamed or synced.
    """
    checks.require_local(str(folder))
    return epath.Path(folder).expanduser().absolute()


def numbers(checkpoints: epath.Path) -> list[int]:
    """Steps that have a folder, in order, be it a good one."""
    found = [manifest.number_of(path.name) for path in _folders(checkpoints)]
    return sorted(number for number in found if number is not None)


def strangers(checkpoints: epath.Path) -> list[str]:
    """Names of folders that look like steps and are none: 007, or Arabic digits."""
    return sorted(
        path.name
        for path in _folders(checkpoints)
        if path.name.isdecimal() and manifest.number_of(path.name) is None
    )


def by_trust(checkpoints: epath.Path) -> list[int]:
    """Steps in the order in which they should be tried, the last one first.

    Newest first, of those with a manifest; then of those without. What lacks a part
    stands before all: it fails at once, and is not overlooked.
    """

    def trust(step: int) -> tuple[bool, bool, int]:
        folder = checkpoints / str(step)
        return bool(missing(folder)), manifest.is_sealed(folder), step

    return sorted(numbers(checkpoints), key=trust)


def find(folder: epath.PathLike) -> epath.Path:
    """The step folder itself, or the newest whole one of a run folder.

    Raises:
      InputError: there is none.
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
    """Names what a step folder lacks to be one; empty where it is whole."""
    if not any((folder / part / "_METADATA").exists() for part in (PARAMS, STATE)):
        return f"{PARAMS}/_METADATA"
    for name in (f"{METADATA}/metadata", _MARK):
        if not (folder / name).exists():
            return name
    return ""


def is_whole(folder: epath.PathLike, step: int) -> bool:
    """Returns whether a run folder has a step, with the files that were written.

    Args:
        folder: of the run.
        step: that it should have.
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
    """Checks that a step's metadata are those of the step that its folder is named by.

    Raises:
      DamagedError: they are of another, or cannot be read.
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
            f"{path} says that {position} batches led to step {step}."
        )


def set_aside(folder: epath.Path, why: str) -> epath.Path:
    """Renames a step folder, so that it is none; returns where it is now."""
    target = folder.parent / f"{folder.name}.{why}"
    count = 1
    while target.exists():
        count += 1
        target = folder.parent / f"{folder.name}.{why}.{count}"
    return folder.rename(target)


def all_set_aside(checkpoints: epath.Path, why: str) -> list[epath.Path]:
    """Folders that were renamed for this reason."""
    paths = _folders(checkpoints)
    return sorted(path for path in paths if path.name.split(".")[1:2] == [why])


def remove(folder: epath.Path) -> None:
    """Deletes a folder, of a link the link; half deleted it never passes for a step."""
    if folder.name.isdecimal():
        folder = set_aside(folder, DELETING)
    if os.path.islink(folder):
        folder.unlink()
        return
    # In a mounted bucket a folder goes with its last file, while it is walked through.
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)  # says what is in the way


def free_bytes(folder: epath.Path) -> int:
    """Room on the disk."""
    return shutil.disk_usage(folder).free


def _folders(checkpoints: epath.Path) -> list[epath.Path]:
    if not checkpoints.is_dir():
        return []
    return [path for path in checkpoints.iterdir() if path.is_dir()]
