"""The folder of a run: which run it belongs to, and the small files in it.

config.json (resolved), metrics.jsonl, summary.json (written last), checkpoints/STEP/,
samples/STEP.txt, episodes/STEP.json.gz, episodes/under_way/GROUP.jsonl, tokenizer.json,
loss.png; rollback.json after a rollback, stacks_N.txt where process N hung, lineage
where hosts keep copies. Process 0 writes all but the checkpoints and the stacks.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from glm5_jax import command_line, files
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager, step_folder
from glm5_jax.config import recorded
from glm5_jax.processes import folder_lock, interrupts, simulate, together
from glm5_jax.training.reporting import metrics

# Settings that may differ between two starts of one run. They change no result, except
# num_steps, which moves the end of the schedule, and the mesh, which changes roundings.
MAY_CHANGE = (
    *("num_steps", "log_every", "eval_every", "eval_batches", "checkpoint_every"),
    *("eval_success", "stop_metric", "stop_at"),
    *("sample_every", "sample_prompt", "sample_tokens"),
    *("checkpoints_to_keep", "checkpoints_keep_every", "checkpoints_keep_best"),
    *("host_copy_every", "host_copy_folder"),
    *(f"mesh.{field.name}" for field in dataclasses.fields(config_lib.MeshConfig)),
    *("trackers", "profile_steps", "data.cache_dir"),
    "data.num_prefetch",  # of earlier versions
    *("rl.max_logprob_gap", "rl.num_eval_tasks", "rl.answer_timeout_seconds"),
    "rl.concurrency",
    *("rl.min_start_success", "rl.max_start_success", "rl.episodes_gib"),
    *("rl.quarantine", "rl.canary_every"),
    # Who samples: a job that queues again gets other nodes.
    *("rl.servers", "rl.weights_store", "rl.num_engines"),
    *("rl.eval_servers", "rl.evaluates_beside"),
    *(f"health.{field.name}" for field in dataclasses.fields(config_lib.HealthConfig)),
)
# Paths of the data may change as well once there is a checkpoint: its fingerprint of
# their content decides.
_OF_CONTENT = ("data.source", "data.mixture", "data.tokenizer")
_OWN = {simulate.LOGS, folder_lock.NAME}  # before there is a config.json
_MAX_SHOWN = 5
_SHARED_SECONDS = 30  # until a network file system must show a new file


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Makes the folder and locks it for this run until the block ends.

    Process 0 does so for all processes. A folder that stays empty is removed.

    Raises:
      InputError: another process has locked it, or it cannot be made.
    """
    path = pathlib.Path(step_folder.absolute(workdir))
    if not together.is_first():
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise config_lib.InputError(
            f"cannot write into {path}: {error.strerror}; give a --workdir in which "
            f"you may create files."
        ) from error

    def remove() -> None:
        with contextlib.suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()

    def remove_locked() -> None:
        (path / folder_lock.NAME).unlink(missing_ok=True)
        remove()

    try:
        with folder_lock.held(path), interrupts.undoing(remove_locked):
            yield
    finally:
        remove()


def claim(workdir: pathlib.Path, config: config_lib.TrainConfig) -> None:
    """Makes the folder, or checks that it belongs to the same run; writes config.json.

    Process 0 does so; the others wait, and check that their config and folder are the
    same. Another run may take the folder of a run that failed before its first step.

    Raises:
      InputError: it cannot be written, belongs to another run, or is not shared.
    """
    path = pathlib.Path(step_folder.absolute(workdir)) / "config.json"

    def first() -> str:
        _claim(path, config)
        return path.read_text(encoding="utf-8")

    text = together.from_first("config.json", first)
    if not together.is_first():
        _require_same_config(json.loads(text), config)
        _require_shared(path, text)


@contextlib.contextmanager
def claimed(workdir: pathlib.Path, config: config_lib.TrainConfig) -> Iterator[None]:
    """Calls `claim`; if the block fails, restores the folder as it was.

    A new folder is emptied; the folder of a run gets its old config.json back.

    Raises:
      InputError: see `claim`.
    """
    path = workdir / "config.json"
    before = path.read_bytes() if path.is_file() else None
    there = {p.name for p in workdir.iterdir()} if workdir.is_dir() else set()
    claim(workdir, config)

    def undo() -> None:
        if before is not None and together.is_first():
            files.write_atomically(path, lambda new: new.write_bytes(before))
        elif together.is_first() and not has_checkpoint(workdir):
            for new in workdir.iterdir():
                if new.name not in there | _OWN:
                    shutil.rmtree(new) if new.is_dir() else new.unlink()

    try:
        with interrupts.undoing(undo):
            yield
    except BaseException:
        undo()
        raise


def finished(workdir: pathlib.Path, config: config_lib.TrainConfig) -> dict | None:
    """Returns summary.json of a run that has done all of its steps, else None.

    Its last checkpoint must be whole, or the run resumes from an older one.

    Raises:
      InputError: the folder belongs to another run.
    """

    def first() -> str:
        path = workdir / "summary.json"
        if not path.is_file():
            return "null"
        _require_same_run(workdir / "config.json", config)
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            step = int(summary["steps"])
        except (ValueError, TypeError, KeyError):  # damaged: it is written again
            return "null"
        if not config.is_over(step, summary) or not step_folder.is_whole(workdir, step):
            return "null"
        metadata = manager.read_metadata(workdir / "checkpoints" / str(step))
        if "config" in metadata:  # earlier versions wrote none
            require_same_run(metadata["config"], config, workdir)
        return json.dumps(summary)

    return json.loads(together.from_first("finished", first))


def require_same_run(
    theirs: dict, config: config_lib.TrainConfig, workdir: pathlib.Path
) -> None:
    """Checks that a run resumes with its own config, up to `MAY_CHANGE`.

    Args:
      theirs: config of the folder, or of a checkpoint in it, from JSON.
      config: the config to resume with.
      workdir: the folder.

    Raises:
      InputError: the configs differ; the message names the fields.
    """
    may_change = MAY_CHANGE + _OF_CONTENT * has_checkpoint(workdir)
    if differing := _differing(theirs, config, may_change):
        raise config_lib.InputError(
            f"{workdir} belongs to another run; give another --workdir, or its "
            f"config. They differ in\n  " + "\n  ".join(differing)
        )


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a file atomically, with null for numbers that are not finite."""
    finite = metrics.finite(content)
    files.write_text(path, json.dumps(finite, indent=2, allow_nan=False) + "\n")


def require_usable(workdir: pathlib.Path, config: config_lib.TrainConfig) -> None:
    """Checks that the folder is free, or belongs to the same run.

    Raises:
      InputError: it holds another run, a model or other files.
    """
    path = workdir / "config.json"
    if path.exists():
        is_run = has_checkpoint(workdir) and _is_of_a_run(path)
        if is_run or (workdir / "metrics.jsonl").exists():
            _require_same_run(path, config)
        elif has_checkpoint(workdir) or not _is_of_a_run(path):
            raise config_lib.InputError(
                f"{workdir} holds a model, not a run; give another --workdir, and "
                f"--config.init_from={workdir} to start from its parameters."
            )
    elif workdir.is_dir() and any(p.name not in _OWN for p in workdir.iterdir()):
        raise config_lib.InputError(
            f"{workdir} is not empty and holds no run (no config.json); give another "
            f"--workdir, so that nothing in it is overwritten."
        )


def _claim(path: pathlib.Path, config: config_lib.TrainConfig) -> None:
    workdir = path.parent
    require_usable(workdir, config)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(path, command_line.to_json_dict(config))
    except OSError as error:
        raise config_lib.InputError(
            f"cannot write into {workdir}: {error.strerror}; give a --workdir in which "
            f"you may create files."
        ) from error


def _is_of_a_run(path: pathlib.Path) -> bool:
    """Returns whether a config.json is a run's, not of `convert` or Hugging Face."""
    try:
        return "num_steps" in json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError):
        return False


def has_checkpoint(workdir: pathlib.Path) -> bool:
    """Returns whether the folder holds a checkpoint to resume from."""
    return bool(step_folder.numbers(step_folder.absolute(workdir) / "checkpoints"))


def _require_same_config(theirs: dict, config: config_lib.TrainConfig) -> None:
    """Checks that process 0 has the same config."""
    if differing := _differing(theirs, config):
        raise config_lib.InputError(
            "this process has another config than process 0; give all processes the "
            "same. They differ in\n  " + "\n  ".join(differing)
        )


def _require_shared(path: pathlib.Path, text: str) -> None:
    """Checks that this process sees the file that process 0 has written."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while not path.exists() or path.read_text(encoding="utf-8") != text:
        if time.monotonic() > deadline:
            raise config_lib.InputError(
                f"another process does not see {path}, which process 0 has written: "
                f"checkpoints need one folder for all. Give a --workdir on a file "
                f"system that all hosts share, by an absolute path."
            )
        time.sleep(0.2)


def _require_same_run(path: pathlib.Path, config: config_lib.TrainConfig) -> None:
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(theirs, dict):
            raise TypeError("it holds no object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise config_lib.InputError(
            f"{path} cannot be read ({error}); give another --workdir."
        ) from error
    require_same_run(theirs, config, path.parent)


def _differing(
    theirs: dict, config: config_lib.TrainConfig, may_change: Sequence[str] = ()
) -> list[str]:
    """Returns a line for each field that differs, for a few at most."""
    ours = recorded.flat(command_line.to_json_dict(config))
    there = recorded.flat(theirs)
    differing = [
        f"{key}: {there.get(key, 'absent')} there, {ours.get(key, 'absent')} here"
        for key in sorted(there | ours)
        if key not in may_change and there.get(key) != ours.get(key)
    ]
    more = len(differing) - _MAX_SHOWN
    return differing[:_MAX_SHOWN] + [f"and {more} more"] * (more > 0)
