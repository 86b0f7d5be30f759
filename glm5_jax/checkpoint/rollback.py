"""Rolls a run back to an older step, and remembers which batches to skip.

After a rollback, a run continues with the batches after those that went wrong. Every
later checkpoint holds the number of skipped batches; until one exists, rollback.json
in the run's folder does.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.checkpoint import (
    host_copies,
    inspection,
    manager,
    manifest,
    step_folder,
)
from glm5_jax.processes import folder_lock

_NAME = "rollback.json"


@dataclasses.dataclass(frozen=True)
class Rollback:
    """The last rollback of a run."""

    step: int  # rolled back to
    num_left_out: int  # batches skipped by all rollbacks of the run
    health: Mapping[str, Any] | None  # its memory; None: take the step's

    @property
    def position(self) -> int:
        """Returns the position of the next batch."""
        return self.step + self.num_left_out


def write(run: epath.PathLike, rollback: Rollback) -> None:
    """Writes rollback.json atomically, with a checksum.

    The hosts' copies of the steps that are undone are worth nothing from here on.
    """
    host_copies.forget(pathlib.Path(step_folder.absolute(run)))
    content = dataclasses.asdict(rollback)
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=2) + "\n"
    files.write_text(pathlib.Path(step_folder.absolute(run) / _NAME), text)


def read(run: epath.PathLike) -> Rollback | None:
    """Returns the last rollback of a run, or None.

    Raises:
      DamagedError: rollback.json fails its checksum.
    """
    path = step_folder.absolute(run) / _NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        checksum = content.pop("checksum", None)  # earlier versions wrote none
        rollback = Rollback(**content)
        is_whole = checksum in (None, _checksum(content))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        is_whole, rollback = False, None
    if not is_whole:
        raise config_lib.DamagedError(
            f"{path} is damaged; it holds how many batches the run's rollbacks "
            f"skipped. Delete it. If the run has saved no checkpoint since its last "
            f"rollback, then repeat the rollback: python -m glm5_jax.checkpoint "
            f"--checkpoint={path.parent} --roll_back=STEP --leave_out=N."
        )
    return rollback


def forget(run: epath.PathLike) -> None:
    """Deletes rollback.json."""
    (step_folder.absolute(run) / _NAME).unlink(missing_ok=True)


def by_hand(
    run: epath.PathLike, step: int, num_left_out: int | None = None
) -> tuple[Rollback, list[int]]:
    """Makes a stopped run resume from an older step.

    Later steps are renamed to STEP.abandoned and deleted by the run's next save.

    Args:
      run: its folder.
      step: an older step with a manifest.
      num_left_out: number of batches to skip after those of the step; None skips all
        up to the newest step, and those that the last rollback skipped. Batches that
        only hosts' copies had seen are not known.

    Returns:
      The rollback as written, and the steps that were set aside.

    Raises:
      InputError: there is no such step, nothing would change, or the run is running.
      DamagedError: the step fails its checksums.
    """
    checkpoints = inspection.checkpoints_of(run)
    with folder_lock.held(checkpoints.parent):
        return _by_hand(checkpoints, step, num_left_out)


def _by_hand(
    checkpoints: epath.Path, step: int, num_left_out: int | None
) -> tuple[Rollback, list[int]]:
    steps = step_folder.numbers(checkpoints)
    if step not in steps or not manifest.is_sealed(checkpoints / str(step)):
        sealed = [n for n in steps if manifest.is_sealed(checkpoints / str(n))]
        raise config_lib.InputError(
            f"there is no step {step} with a manifest in {checkpoints}; give one of "
            f"{sealed}."
        )
    later = [n for n in steps if n > step]
    has_copies = bool(host_copies.read_lineage(pathlib.Path(checkpoints.parent)))
    if not later and not num_left_out and not has_copies:
        raise config_lib.InputError(
            f"step {step} is already the newest in {checkpoints}; give an older step, "
            f"or --leave_out=N to skip batches."
        )
    manifest.verify(checkpoints / str(step))
    here = _position(checkpoints / str(step), step)
    if num_left_out is None:
        num_left_out = _last_position(checkpoints, steps, step) - here
    rollback = Rollback(step, here - step + num_left_out, None)
    write(checkpoints.parent, rollback)
    for number in later:  # newest last, so that a killed command can be rerun
        step_folder.set_aside(checkpoints / str(number), step_folder.ABANDONED)
    return rollback, later


def _last_position(checkpoints: epath.Path, steps: Sequence[int], step: int) -> int:
    """Returns the batches drawn up to the newest step, or up to the last rollback.

    Args:
      checkpoints: folder of the steps.
      steps: all of them.
      step: to which the run goes back, for the message.

    Raises:
      DamagedError: the newest step or rollback.json does not tell.
    """
    newest = max(steps)  # the step itself, where only copies on hosts are newer
    try:
        position = _position(checkpoints / str(newest), newest)
    except config_lib.DamagedError as error:
        raise config_lib.DamagedError(
            f"{error} It would tell how many batches the run had drawn: say with "
            f"--leave_out=N how many to skip after step {step}."
        ) from error
    note = read(checkpoints.parent)  # no checkpoint has it yet
    return max(position, note.position) if note and note.step in steps else position


def _position(folder: epath.Path, step: int) -> int:
    """Returns the number of batches drawn up to a step."""
    step_folder.require_number(folder)
    return manager.read_metadata(folder).get("position", step)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
