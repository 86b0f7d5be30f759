"""Saves and restores the checkpoints of a run, FOLDER/checkpoints/STEP/.

Orbax writes a step under a temporary name and renames it at the end. Then its files are
hashed and its manifest is written ("sealed"); only after that are older steps deleted.
All of this happens in the background. A run resumes from the newest step that matches
its manifest. Several processes write one step, each its own shards, and all read the
same one: process 0 decides which steps exist, and a step that any process finds damaged
is skipped by all.
"""

import functools
import itertools
import json
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import (
    arrays,
    manifest,
    retention,
    step_folder,
    step_windows,
    stored,
)
from glm5_jax.processes import together

PyTree = Any
# Errors that do not mean a damaged checkpoint: a wrong config, too little memory.
_NOT_UNREADABLE = (config_lib.InputError, MemoryError, jax.errors.JaxRuntimeError)
_PARTS = (step_folder.PARAMS, step_folder.STATE, step_folder.METADATA)


class CheckpointManager:
    """Saves and restores the state of one run."""

    def __init__(self, folder: epath.PathLike, keep: int | retention.Retention) -> None:
        """Opens a run folder, which may be missing, and removes unfinished saves.

        Args:
            folder: of the run.
            keep: number of newest steps to keep, or a whole rule, applied after a save.

        Raises:
            InputError: the folder is not writable.
        """
        if isinstance(keep, int):
            keep = retention.Retention(newest=keep)
        self._retention = keep
        self._folder = step_folder.absolute(folder) / "checkpoints"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f"writable_{jax.process_index()}"
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise config_lib.InputError(
                f"cannot write checkpoints into {self._folder}: {error}. Give a "
                f"--workdir in which you may create files."
            ) from error
        if jax.process_index() == 0:
            for path in step_folder.all_set_aside(self._folder, step_folder.DELETING):
                step_folder.remove(path)
            if strangers := step_folder.strangers(self._folder):
                logging.warning(
                    "Ignored %s in %s: a step's folder has no leading zeros.",
                    strangers,
                    self._folder,
                )
        self._orbax = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                # None is left to Orbax: it would delete before the new step is sealed.
                preservation_policy=ocp.checkpoint_managers.LatestN(None),
                cleanup_tmp_directories=True,
                lightweight_initialize=True,
            ),
            item_names=_PARTS,
        )
        self._saved: set[int] = set()
        self._restored: int | None = None
        # One thread for all saves: starting one takes as long as a save blocks.
        self._thread = futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: futures.Future[None] | None = None
        self._seals = itertools.count()

    def save(self, step: int, state: PyTree, metadata: dict[str, Any]) -> None:
        """Copies the state and writes it in the background.

        The state may be donated as soon as this returns. Existing steps with this or a
        later number, from an earlier run or from before a rollback, are set aside and
        deleted once this one is sealed. Saving a step twice does nothing.

        Args:
            step: updates done.
            state: dict of arrays, with "params" among its keys.
            metadata: anything that JSON can hold; its "metrics" decide which steps are
                the best.

        Raises:
            FloatingPointError: the state holds a NaN or an infinity.
            OSError: the disk is too full, or the save before this one failed.
        """
        if step in self._saved:
            return
        self.wait()
        if not arrays.is_finite(state):
            raise FloatingPointError(
                f"the state of step {step} is not finite, so it was not saved; the "
                f"newest checkpoint is step {self.latest_step()} in {self._folder}."
            )
        self._require_space(state)
        self._abandon_from(step)
        self._saved.add(step)

        def write(state: PyTree) -> None:
            # Without force Orbax skips a step below the newest one, silently.
            self._orbax.save(step, args=stored.to_save(state, metadata), force=True)

        if jax.process_count() > 1:
            write(state)  # joins the other processes, from the main thread only
            later = lambda: None
        else:
            later = functools.partial(write, arrays.copied(state))
        self._pending = self._thread.submit(self._finish, step, later)

    def restore(
        self,
        abstract_state: PyTree,
        step: int | None = None,
        before: int | None = None,
    ) -> tuple[int, PyTree, dict[str, Any]]:
        """Restores a step, by default the newest that matches its manifest.

        Steps without a manifest are tried last. A step that is damaged, or holds a NaN
        or infinity, is renamed to STEP.damaged if another one can be read. After the
        restore of a named step, saves continue from it and replace later ones.

        Args:
            abstract_state: shapes, types and shardings of the result, or such arrays.
            step: a step that must be read, or None.
            before: a step; only older ones are tried.

        Returns:
            Step, state, metadata.

        Raises:
            InputError: there is no such checkpoint, or it has other shapes.
            RuntimeError: there are checkpoints, but none can be read.
        """
        self.wait()
        steps = together.numbers_of_first(step_folder.by_trust(self._folder))
        steps = [n for n in steps if before is None or n < before]
        if not steps or step not in (None, *steps):
            wanted = "checkpoint" if step is None else f"step {step}"
            raise config_lib.InputError(
                f"there is no {wanted} in {self._folder}; it holds steps "
                f"{sorted(steps)}."
            )
        damaged: dict[int, Exception] = {}
        for candidate in reversed(steps) if step is None else [step]:
            folder = self._folder / str(candidate)
            found, error = _attempt(folder, abstract_state)
            is_read = together.all_true(found is not None)
            if is_read and found is not None and arrays.is_finite(found[0]):
                self._set_aside([*damaged], step_folder.DAMAGED)
                newer = [n for n in steps if n > candidate and n not in damaged]
                if newer:  # unsealed, or from before a rollback
                    logging.warning("STEPS %s ARE SKIPPED.", newer)
                self._restored = candidate
                self._saved = {n for n in self._saved if n < candidate} | {candidate}
                return candidate, *found
            why = "holds a NaN or an infinity" if is_read else "is not readable by all"
            error, found = error or config_lib.DamagedError(f"{folder} {why}."), None
            damaged[candidate] = error
            logging.error("STEP %d IS DAMAGED: %s", candidate, _short(error))
        if step is not None:
            raise damaged[step]
        reasons = "\n  ".join(f"{k}: {_short(e)}" for k, e in damaged.items())
        raise config_lib.DamagedError(
            f"none of the steps {sorted(steps)} in {self._folder} can be read; nothing "
            f"was changed. Give another --workdir, or move checkpoints/ away to start "
            f"a new run.\n  {reasons}"
        )

    def abandon_after(self, step: int) -> None:
        """Sets aside the steps after one that a run has been rolled back to."""
        on_disk = together.numbers_of_first(step_folder.numbers(self._folder))
        self._set_aside([n for n in on_disk if n > step], step_folder.ABANDONED)

    def has_before(self, step: int) -> bool:
        """Returns whether an older step is sealed; all processes must call."""
        return any(n < step for n in self._sealed())

    def newest_sealed(self) -> int:
        """Returns the newest step with a manifest, or -1; all processes must call."""
        return max(self._sealed(), default=-1)

    def _sealed(self) -> list[int]:
        steps = step_folder.numbers(self._folder)
        sealed = [n for n in steps if manifest.is_sealed(self._folder / str(n))]
        return together.numbers_of_first(sealed)

    def latest_step(self) -> int | None:
        """Returns the newest step that process 0 sees; all processes must call."""
        steps = together.numbers_of_first(step_folder.numbers(self._folder))
        return max(steps, default=None)

    def check_for_errors(self) -> None:
        """Raises the error of a save in the background, if one failed."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until all saves are sealed; raises if one failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for saves and stops the threads."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
        self._orbax.close()

    def _finish(self, step: int, write: Callable[[], None]) -> None:
        """Writes a save in the background, seals it, and deletes older steps."""
        try:
            write()
            self._orbax.wait_until_finished()  # raises its errors
            self._seal(self._folder / str(step))
            if jax.process_index() == 0:
                self._delete_old()
        except (OSError, ValueError) as error:  # TensorStore's, of a full disk
            self._saved.discard(step)
            raise OSError(
                f"the checkpoint of step {step} cannot be written into {self._folder}: "
                f"{_short(error)} Older checkpoints are unchanged."
            ) from error
        except BaseException:  # raised again in the thread that waits
            self._saved.discard(step)
            raise

    def _seal(self, folder: epath.Path) -> None:
        name = f"manifest/{folder}/{next(self._seals)}"  # never used before
        manifest.seal(
            folder, jax.process_index(), lambda text: together.to_first(name, text)
        )

    def _delete_old(self) -> None:
        steps = describe_steps(self._folder)
        for step in self._retention.to_delete(steps):
            step_folder.remove(self._folder / str(step))
        for path in step_folder.all_set_aside(self._folder, step_folder.ABANDONED):
            step_folder.remove(path)

    def _require_space(self, state: PyTree) -> None:
        free = step_folder.free_bytes(self._folder)
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        if free < needed:
            raise OSError(
                f"a checkpoint takes {needed:,} bytes, but only {free:,} are free on "
                f"the disk of {self._folder}; free some space or lower "
                f"checkpoints_to_keep. Old steps are deleted only after a new one is "
                f"safe."
            )

    def _abandon_from(self, step: int) -> None:
        """Sets aside steps that do not belong to the branch of this step."""
        first = step if self._restored is None else min(step, self._restored + 1)
        on_disk = together.numbers_of_first(step_folder.numbers(self._folder))
        others = [n for n in on_disk if n >= first and n not in self._saved]
        if others:
            logging.warning(
                "Steps %s in %s belong to an abandoned branch; they are deleted once "
                "step %d is safe.",
                others,
                self._folder,
                step,
            )
            self._set_aside(others, step_folder.ABANDONED)

    def _set_aside(self, steps: list[int], why: str) -> None:
        if jax.process_index() == 0:
            for step in steps:
                step_folder.set_aside(self._folder / str(step), why)
        together.all_true(True)  # from here on no process finds them
        self._orbax.reload()


def restore_params(folder: epath.PathLike, abstract_params: PyTree) -> PyTree:
    """Reads only the parameters, to start a stage, evaluate, or generate.

    The rest of the step is neither read nor hashed.

    Args:
        folder: a run folder (its newest step) or a step folder.
        abstract_params: shapes, types and shardings of the result.

    Raises:
        InputError: there is no checkpoint, or it is of another model.
        DamagedError: a file fails its checksum.
    """
    verify_params(path := step_folder.find(folder))
    return step_windows.read_params(path, abstract_params)


def read_state(folder: epath.PathLike, abstract_state: PyTree) -> PyTree:
    """Reads the whole state of a step folder, verified; changes nothing on the disk."""
    path = step_folder.absolute(folder)
    _verify(path)
    return stored.read(path, abstract_state, "state")


def require_shapes(folder: epath.PathLike, abstract_params: PyTree) -> None:
    """Checks that `restore_params` would find every parameter, without reading any.

    Raises:
        InputError: there is no checkpoint, or it is of another model.
    """
    stored.require_shapes(step_folder.find(folder), abstract_params, "model")


def verify_params(folder: epath.PathLike) -> None:
    """Verifies a step's parameter files against its manifest.

    Raises:
        DamagedError: a file fails its checksum.
    """
    path = step_folder.absolute(folder)
    # Steps from before manifests hold the parameters in state/.
    is_apart = (path / step_folder.PARAMS).exists()
    _verify(path, without=[step_folder.STATE] if is_apart else [])


def read_metadata(folder: epath.PathLike) -> dict[str, Any]:
    """Returns the metadata of a step folder, or of the newest step of a run folder."""
    path = step_folder.find(folder)
    return json.loads((path / step_folder.METADATA / "metadata").read_text())


def describe_steps(checkpoints: epath.Path) -> list[retention.Step]:
    """Describes every folder that looks like a step, for a retention rule."""
    steps = []
    for number in step_folder.numbers(checkpoints):
        folder = checkpoints / str(number)
        if step_folder.missing(folder):  # not a whole step: never deleted
            continue
        try:
            metrics = read_metadata(folder).get("metrics", {})
        except (OSError, ValueError, AttributeError):  # never among the best
            metrics = {}
        steps.append(retention.Step(number, manifest.is_sealed(folder), metrics))
    return steps


def _attempt(
    folder: epath.Path, abstract_state: PyTree
) -> tuple[tuple[PyTree, dict[str, Any]] | None, Exception | None]:
    """Returns state and metadata of a step, or the reason why it cannot be read."""
    try:
        if lacking := step_folder.missing(folder):
            raise config_lib.DamagedError(f"{folder} has no {lacking}.")
        state = read_state(folder, abstract_state)
        return (state, read_metadata(folder)), None
    except _NOT_UNREADABLE:
        raise
    except Exception as error:  # Orbax raises Exception itself
        return None, error


def _verify(folder: epath.Path, without: list[str] | None = None) -> None:
    """Verifies this process's part of the files."""
    count = jax.process_count()
    hashed = manifest.verify(folder, without or (), jax.process_index(), count)
    if hashed is None:
        logging.warning(
            "%s HAS NO MANIFEST and is read unverified: an earlier version wrote it, "
            "or its writer was killed before it wrote the manifest.",
            folder,
        )
    step_folder.require_number(folder)


def _short(error: Exception | None) -> str:
    text = str(error)  # TensorStore's are pages long, the reason last
    return text if len(text) <= 400 else f"{text[:150]} ... {text[-250:]}"
