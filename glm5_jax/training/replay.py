"""Learns again what a run has learnt, from the episodes that it kept.

The parameters after a step are a function of those before it and of the groups that the
step took (rl/episode_files.py), so a replay needs neither engine nor environment. On
the same machine it gives the same parameters, bit for bit, and the same metrics: also
those of a step that was skipped because its gradient was not finite.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager, step_folder
from glm5_jax.rl import episode_files
from glm5_jax.training import critic as critic_lib
from glm5_jax.training import program as program_lib
from glm5_jax.training import reference, teachers
from glm5_jax.training.feeds import policy_batch
from glm5_jax.training.reporting import metrics as metrics_lib
from glm5_jax.training.run import state as run_lib


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a replay gave."""

    first: int  # step whose checkpoint it began with; 0: the start of the run
    last: int  # step that it ended with
    is_same: bool | None  # as the checkpoint of the last step; None: there is none
    different: int  # parameters and a critic's numbers that differ from it
    sha256: str  # of all parameters
    metrics: Mapping[str, float | None]  # of the last step; None: not finite


def config_of(workdir: pathlib.Path) -> config_lib.TrainConfig:
    """Returns the config of a run.

    Raises:
      InputError: the folder holds no run.
    """
    path = workdir / "config.json"
    try:
        return command_line.resolve(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise config_lib.InputError(
            f"--run must be the folder of a run, got {workdir}: {path} cannot be read "
            f"({error})."
        ) from error


def replay(
    workdir: pathlib.Path, last: int | None = None, skipped: int | None = None
) -> Replayed:
    """Replays as many steps as can be, and compares the end with its checkpoint.

    Args:
      workdir: folder of a run of stage rl or async_rl, which is only read.
      last: step to end with; None: the newest checkpoint, or the newest step kept.
      skipped: position of a batch in skipped/. The replay ends with its step, from the
        newest checkpoint before it, and compares nothing.

    Raises:
      InputError: too few episodes or checkpoints are there.
      DamagedError: a file is damaged.
    """
    config = config_of(workdir)
    checkpoints = step_folder.absolute(workdir) / "checkpoints"
    saved = step_folder.numbers(checkpoints)
    steps = manager.read_metadata(workdir).get("pinned", {}) if saved else {}
    if skipped is None:
        first, last = _span(episode_files.numbers(workdir), saved, last)
    else:
        first, last = _before_skipped(workdir, checkpoints, skipped)
        saved = []
    mesh = run_lib.make_mesh(config)
    program = program_lib.make_program(config, mesh)
    critic = critic_lib.make(config, program)
    shapes = {"params": program.params, "opt_state": program.opt_state, **critic.state}
    with jax.set_mesh(mesh):
        if first:
            state = manager.read_state(checkpoints / str(first), shapes)
            params, opt_state = state["params"], state["opt_state"]
            judge = {name: state[name] for name in critic.state}
        else:
            params, opt_state = run_lib.initial(config, program, steps)
            judge = critic.init(params)
        with_reference = reference.make(config, program, steps)
        with_teachers = teachers.make(config, program, steps)
        learn = program.compile(config.num_rows)
        metrics: dict[str, Any] = {}
        for step in range(first + 1, last + 1):
            if skipped is None:
                kept = episode_files.read(workdir, step)
            else:
                kept = _read(workdir, step, skipped - (last - step))
            batch = policy_batch.make(config, [*map(list, kept.groups)], kept.position)
            placed = jax.device_put(batch, program_lib.batch_place(mesh))
            placed = with_teachers(with_reference(placed))
            judge, placed, judged = critic.step(judge, placed)
            params, opt_state, metrics = learn(params, opt_state, placed)
            metrics |= judged
            logging.info("Step %d: loss %.6g.", step, float(metrics["train/loss"]))
        different = None
        if last in saved:
            there = manager.read_state(checkpoints / str(last), shapes)
            del there["opt_state"]
            different = _num_different({"params": params, **judge}, there)
    is_same = None if different is None else not different
    told = metrics_lib.finite({name: float(x) for name, x in metrics.items()})
    return Replayed(first, last, is_same, different or 0, _digest(params), told)


def _span(kept: list[int], saved: list[int], last: int | None) -> tuple[int, int]:
    """Returns the longest span of steps that can be replayed, which ends with `last`.

    Raises:
      InputError: there is none.
    """
    if last is None:
        last = max((step for step in saved if step in kept), default=max([0, *kept]))
    oldest = last + 1
    while oldest - 1 in kept:
        oldest -= 1
    starts = [step for step in (0, *saved) if oldest - 1 <= step < last]
    if not starts:
        raise config_lib.InputError(
            f"nothing can be replayed up to step {last}: it needs the episodes of all "
            f"steps since a checkpoint; kept are those of {_spans(kept)}, and the "
            f"checkpoints {saved}. Raise rl.episodes_gib in the run to keep more."
        )
    return min(starts), last


def _before_skipped(
    workdir: pathlib.Path, checkpoints: epath.Path, position: int
) -> tuple[int, int]:
    """Returns the newest checkpoint that led to a skipped batch, and the batch's step.

    A later rollback makes other steps of the same numbers. It skipped more batches, so
    their positions are further from their steps.
    """
    step = episode_files.read(workdir, position, episode_files.SKIPPED).step
    saved = [n for n in step_folder.numbers(checkpoints) if n < step]
    for before in reversed(saved):
        metadata = manager.read_metadata(checkpoints / str(before))
        if metadata.get("position", before) - before <= position - (step - 1):
            return before, step
    return 0, step


def _read(workdir: pathlib.Path, step: int, position: int) -> episode_files.Step:
    """Returns what a step learnt from at a position.

    Raises:
      InputError: it is not kept.
    """
    if position in episode_files.numbers(workdir, episode_files.SKIPPED):
        return episode_files.read(workdir, position, episode_files.SKIPPED)
    if step in episode_files.numbers(workdir):
        kept = episode_files.read(workdir, step)
        if kept.position == position:
            return kept
    raise config_lib.InputError(
        f"the weights of the skipped batch cannot be had again: they need batch "
        f"{position} of step {step}, which is not kept. Replay it sooner, or raise "
        f"rl.episodes_gib in the run."
    )


def _spans(steps: list[int]) -> str:
    """Returns "3..5, 7"."""
    ends = [s for s in steps if s + 1 not in steps]
    begins = [s for s in steps if s - 1 not in steps]
    pairs = zip(begins, ends, strict=True)
    return ", ".join(f"{a}..{b}" if a < b else f"{a}" for a, b in pairs) or "none"


def _num_different(ours: Any, theirs: Any) -> int:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return sum(int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in pairs)


def _digest(params: Any) -> str:
    """Returns the SHA-256 of all parameters, in the order of their paths."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()
