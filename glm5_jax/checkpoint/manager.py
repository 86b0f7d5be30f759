"""Checkpoints of a run: FOLDER/checkpoints/STEP/, written by Orbax in the background.

A step folder holds state/ (the arrays) and metadata/ (JSON: config, fingerprint of the
data). Orbax writes under a temporary name and renames at the end, so that a step either
exists or does not; which of them count as complete is decided in `_complete_steps`.
Several processes write one step, each its shards, and read the same one: what process 0
sees on disk counts, and a step that one of them cannot read counts for none.
"""

import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from glm5_jax import config as config_lib
from glm5_jax.processes import together

PyTree = Any
_STATE, _METADATA = "state", "metadata"
# What is not the checkpoint's fault: a wrong config, too little memory.
_NOT_UNREADABLE = (config_lib.InputError, MemoryError, jax.errors.JaxRuntimeError)
_MAX_NAMED = 5  # differing leaves that a message names


class CheckpointManager:
    """Saves and restores the state of one run."""

    def __init__(self, folder: epath.PathLike, keep: int) -> None:
        """Opens a run folder, which need not exist, and removes unfinished saves.

        Args:
            folder: of the run.
            keep: newest steps to keep; older ones are deleted after a save.

        Raises:
            InputError: nothing can be written there.
        """
        self._folder = _absolute(folder) / "checkpoints"
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
        preserve = ocp.checkpoint_managers.LatestN(keep)
        self._orbax = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=preserve, cleanup_tmp_directories=True
            ),
            item_names=(_STATE, _METADATA),
        )
        self._saved: set[int] = set()

    def save(self, step: int, state: PyTree, metadata: dict[str, Any]) -> None:
        """Copies the state and writes it in the background.

        The state may be donated as soon as this returns. A step that an earlier run
        left here, because this one was rolled back, is replaced; saving a step twice
        in one run does nothing.

        Args:
            step: updates done.
            state: dict of arrays, with "params" among its keys.
            metadata: anything that JSON can hold.

        Raises:
            FloatingPointError: the state holds a NaN or an infinity.
            OSError: the disk is too full, or the save before this one failed.
        """
        if step in self._saved:
            return
        self.check_for_errors()
        if not _is_finite(state):
            raise FloatingPointError(
                f"the state of step {step} is not finite, so it was not saved; the "
                f"newest checkpoint is step {self.latest_step()} in {self._folder}."
            )
        self._require_space(state)
        if step in self._orbax.all_steps():
            logging.warning("Replacing step %d in %s.", step, self._folder)
            self._orbax.delete(step)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state), metadata=ocp.args.JsonSave(metadata)
        )
        # Without force Orbax skips a step below the newest one, silently.
        self._orbax.save(step, args=items, force=True)
        self._saved.add(step)

    def restore(
        self, abstract_state: PyTree, step: int | None = None
    ) -> tuple[int, PyTree, dict[str, Any]]:
        """Reads a step; without a number the newest that can be read.

        A step that some process cannot read is renamed to STEP.unreadable and the one
        before it taken.

        Args:
            abstract_state: shapes, types and shardings of the result; arrays will do.
            step: a step that must be read, or None.

        Returns:
            Step, state, metadata.

        Raises:
            InputError: there is no such checkpoint, or it has other shapes.
            RuntimeError: there are checkpoints, but none can be read.
        """
        self.wait()
        steps = together.numbers_of_first(_complete_steps(self._folder))
        if not steps or step not in (None, *steps):
            wanted = "complete checkpoint" if step is None else f"complete step {step}"
            raise config_lib.InputError(
                f"there is no {wanted} in {self._folder}; it holds steps {steps}."
            )
        for candidate in reversed(steps) if step is None else [step]:
            folder = self._folder / str(candidate)
            found: tuple[PyTree, dict[str, Any]] | None = None
            reason = "another process cannot read it"
            try:
                found = _read(folder, abstract_state, "state"), read_metadata(folder)
            except Exception as error:  # Orbax raises Exception itself
                if step is not None or isinstance(error, _NOT_UNREADABLE):
                    raise
                reason = str(error)[:200]  # TensorStore's messages run to pages
            if together.all_true(found is not None) and found is not None:
                return candidate, *found
            logging.error("CANNOT READ %s, FALLING BACK: %s", folder, reason)
            self._set_aside(folder)
        raise RuntimeError(f"none of the steps {steps} in {self._folder} can be read.")

    def latest_step(self) -> int | None:
        """The newest complete step on disk, as process 0 sees it; all must ask."""
        steps = together.numbers_of_first(_complete_steps(self._folder))
        return max(steps, default=None)

    def check_for_errors(self) -> None:
        """Raises the error of a save in the background, if one failed."""
        self._orbax.check_for_errors()

    def wait(self) -> None:
        """Returns when nothing is being written; raises if a save failed."""
        self._orbax.wait_until_finished()
        self.check_for_errors()

    def close(self) -> None:
        """Waits, and stops the threads."""
        self.wait()
        self._orbax.close()

    def _require_space(self, state: PyTree) -> None:
        if "://" in str(self._folder):
            return
        needed = sum(x.nbytes for x in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(
                f"a checkpoint takes {needed:,} bytes, {free:,} are free on the disk "
                f"of {self._folder}; make room or lower checkpoints_to_keep. Old steps "
                f"are deleted only after a new one is safe."
            )

    def _set_aside(self, folder: epath.Path) -> None:
        if jax.process_index() == 0:
            folder.rename(folder.parent / f"{folder.name}.unreadable")
        together.all_true(True)  # who lists the steps now does not find it any more
        self._orbax.reload()


def restore_params(folder: epath.PathLike, abstract_params: PyTree) -> PyTree:
    """Reads the parameters alone, for a stage's start, evaluation or generation.

    Args:
        folder: a run folder (its newest step) or a step folder.
        abstract_params: shapes, types and shardings of the result.

    Raises:
        InputError: there is no checkpoint, or it is of another model.
    """
    state = _read(find_step(folder), {"params": abstract_params}, "model")
    return state["params"]


def read_metadata(folder: epath.PathLike) -> dict[str, Any]:
    """The metadata of a step folder, or of the newest step of a run folder."""
    return json.loads((find_step(folder) / _METADATA / "metadata").read_text())


def find_step(folder: epath.PathLike) -> epath.Path:
    """The step folder itself, or the newest complete one of a run folder.

    Raises:
        InputError: there is none.
    """
    path = _absolute(folder)
    if _is_complete(path):
        return path
    for parent in (path / "checkpoints", path):
        if steps := _complete_steps(parent):
            return parent / str(steps[-1])
    raise config_lib.InputError(
        f"there is no checkpoint in {path}: it is neither a step folder (with state/ "
        f"and metadata/) nor a run folder (with checkpoints/STEP/)."
    )


def _complete_steps(folder: epath.Path) -> list[int]:
    """Steps whose folder is whole, in order; an empty 9/ is not step 9."""
    if not folder.is_dir():
        return []
    numbered = [path for path in folder.iterdir() if path.name.isdecimal()]
    return sorted(int(path.name) for path in numbered if _is_complete(path))


def _is_complete(folder: epath.Path) -> bool:
    files = (f"{_STATE}/_METADATA", f"{_METADATA}/metadata", "_CHECKPOINT_METADATA")
    return all((folder / file).exists() for file in files)


def _absolute(folder: epath.PathLike) -> epath.Path:
    return epath.Path(folder).expanduser().absolute()  # Orbax refuses relative ones


def _read(step_folder: epath.Path, abstract: PyTree, what: str) -> PyTree:
    """Reads those leaves of a step's state that `abstract` has."""
    abstract = jax.tree.map(_with_sharding, abstract)
    path = step_folder / _STATE
    if not ocp.utils.is_checkpoint_finalized(path):
        raise ValueError(f"{path} was not finished.")
    # Not by a Checkpointer: where one process cannot read, the others would wait for it
    # at the end of its restore.
    handler = ocp.PyTreeCheckpointHandler()
    try:
        stored = handler.metadata(path).tree
        _require_same_shapes(stored, abstract, f"the {what} in {step_folder}")
        arguments = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        return handler.restore(path, args=arguments)
    finally:
        handler.close()


def _with_sharding(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(
        jax.local_devices()[0]
    )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _require_same_shapes(stored: PyTree, wanted: PyTree, what: str) -> None:
    """Orbax returns a leaf that it does not find unread: compare before."""
    theirs, ours = _shapes(stored), _shapes(wanted)
    tops = {name.split(".")[0] for name in ours}
    theirs = {k: v for k, v in theirs.items() if k.split(".")[0] in tops}
    differing = [
        f"{name}: {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        for name in sorted(theirs | ours, key=lambda name: (name[:6] != "params", name))
        if theirs.get(name) != ours.get(name)
    ]
    if differing:
        more = len(differing) - _MAX_NAMED
        shown = differing[:_MAX_NAMED] + [f"and {more} more"] * (more > 0)
        raise config_lib.InputError(
            f"{what} has other shapes than the config asks for:\n  "
            + "\n  ".join(shown)
            + "\nUse the config of the run that wrote it (config.json in its folder), "
            "or another --workdir to start afresh."
        )


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Shape by dotted path; named tuples and dicts look the same, as on disk."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = jax.tree_util.keystr
    return {name(path, simple=True, separator="."): x.shape for path, x in leaves}


def _is_finite(state: PyTree) -> bool:
    leaves = jax.tree.leaves(state)
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return bool(jnp.isfinite(_total(floats)))


@jax.jit
def _total(arrays: list[jax.Array]) -> jax.Array:
    """A sum is finite where all terms are; it compiles 5 times faster than a test."""
    arrays = jax.device_put(arrays, jax.memory.Space.Device)  # some wait on the host
    return sum((jnp.sum(x, dtype=jnp.float32) for x in arrays), jnp.float32(0))
