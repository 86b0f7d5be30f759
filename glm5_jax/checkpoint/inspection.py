"""Lists, verifies and prunes the steps of a run, for the command line."""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tqdm
from etils import epath

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager, manifest, retention, step_folder

NO_MANIFEST = "no manifest"


class Row(NamedTuple):
    """One line of the table: a step, or a set-aside folder."""

    folder: epath.Path
    size: int  # bytes
    age: float  # seconds
    metrics: Mapping[str, Any]
    status: str  # a word or two
    problem: str = ""  # what is damaged


def find(path: epath.PathLike) -> list[epath.Path]:
    """Returns the step folders at a path: all of a run, or a single one.

    Raises:
      InputError: there are none.
    """
    folder = step_folder.absolute(path)
    for parent in (folder / "checkpoints", folder):
        if found := step_folder.numbers(parent):
            return [parent / str(step) for step in found]
    return [step_folder.find(folder)]


def overview(path: epath.PathLike, is_verified: bool = False) -> list[Row]:
    """Returns the rows of a run's steps, or of one, and of what was set aside there."""
    folders = find(path)
    return describe(folders, is_verified) + describe_set_aside(folders[0].parent)


def describe(folders: Sequence[epath.Path], is_verified: bool = False) -> list[Row]:
    """Returns a row for each step; reads files only to verify them."""
    return _rows(folders, functools.partial(_describe, is_verified=is_verified))


def describe_set_aside(checkpoints: epath.Path) -> list[Row]:
    """Returns a row for each set-aside folder."""
    folders = [
        folder
        for why in step_folder.REASONS
        for folder in step_folder.all_set_aside(checkpoints, why)
    ]
    return _rows(folders, _describe_set_aside)


def checkpoints_of(run: epath.PathLike) -> epath.Path:
    """Returns the folder that holds a run's steps.

    Raises:
      InputError: the path is no run.
    """
    folder = step_folder.absolute(run)
    for path in (folder / "checkpoints", folder):
        if path.name == "checkpoints" and path.is_dir():
            return path
    raise config_lib.InputError(
        f"{folder} is not a run folder: it has no checkpoints/. Nothing was changed; "
        f"give the folder of a run."
    )


def rule_of(checkpoints: epath.Path, **changes: Any) -> retention.Retention:
    """Returns the retention rule of a run's config.json, with changes.

    Args:
      checkpoints: its folder of steps.
      **changes: fields of the rule; None keeps the run's value.

    Raises:
      InputError: config.json has no rule, or a number is out of range.
    """
    given: dict[str, Any] = {
        name: value for name, value in changes.items() if value is not None
    }
    path = checkpoints.parent / "config.json"
    try:
        rule = retention.of_run(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if "newest" not in given:
            raise config_lib.InputError(
                f"{path} has no retention rule ({error!r}); give --keep=N."
            ) from error
        rule = retention.Retention(newest=given["newest"])
    rule = dataclasses.replace(rule, **given)
    if rule.newest < 1 or rule.every < 0 or rule.best < 0:
        raise config_lib.InputError(
            f"--keep must be at least 1, --keep_every and --keep_best at least 0, got "
            f"{rule.newest}, {rule.every} and {rule.best}."
        )
    return rule


def to_prune(checkpoints: epath.Path, rule: retention.Retention) -> list[Row]:
    """Returns rows of what to delete: steps that the rule drops, set-aside folders."""
    going = rule.to_delete(manager.describe_steps(checkpoints))
    steps = describe([checkpoints / str(step) for step in going])
    return steps + describe_set_aside(checkpoints)


def prune(checkpoints: epath.Path, rows: Sequence[Row]) -> None:
    """Deletes folders, after the newest sealed step has been verified.

    Raises:
      InputError: there is no such step.
      DamagedError: that step fails its checksums; nothing was deleted.
    """
    steps = manager.describe_steps(checkpoints)
    safe = [step.number for step in steps if step.is_safe]
    if not safe:
        raise config_lib.InputError(
            f"no step in {checkpoints} has a manifest, so none can be verified and "
            f"nothing was deleted. Resume the run: its next save writes a manifest."
        )
    try:
        manifest.verify(checkpoints / str(max(safe)))
    except config_lib.DamagedError as error:
        raise config_lib.DamagedError(f"{error} Nothing was deleted.") from error
    for row in tqdm.tqdm(rows, desc="delete", disable=None):
        with contextlib.suppress(FileNotFoundError):  # a running job deletes too
            step_folder.remove(row.folder)


def table(rows: list[Row]) -> str:
    """Formats rows as text: step, size, age, metrics, status."""
    cells = [("step", "size", "age", "evaluation", "status")]
    for row in rows:
        metrics = [f"{k.removeprefix('eval/')} {v:.4g}" for k, v in row.metrics.items()]
        metric = ", ".join(metrics[:2])
        age = _age(row.age)
        cells.append((row.folder.name, bytes_text(row.size), age, metric, row.status))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            text.ljust(width) if i > 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines += [f"error: {row.problem}" for row in rows if row.problem]
    return "\n".join(line.rstrip() for line in lines)


def bytes_text(num_bytes: int) -> str:
    """Formats a size as 12.3 MB, by powers of 1000."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def _rows(
    folders: Sequence[epath.Path], describe_one: Callable[[epath.Path], Row]
) -> list[Row]:
    rows = []
    for folder in folders:
        try:
            rows.append(describe_one(folder))
        except FileNotFoundError:
            if folder.exists():
                raise  # otherwise the run has just deleted it
    return rows


def _describe_set_aside(folder: epath.Path) -> Row:
    size = sum(manifest.files(folder).values())
    return Row(folder, size, _seconds_since(folder), {}, "set aside")


def _describe(folder: epath.Path, is_verified: bool) -> Row:
    size, age = sum(manifest.files(folder).values()), _seconds_since(folder)
    status, problem = NO_MANIFEST, ""
    began = time.perf_counter()
    try:
        if lacking := step_folder.missing(folder):
            raise config_lib.DamagedError(f"{folder} has no {lacking}.")
        step_folder.require_number(folder)
        if (entries := manifest.read(folder)) is not None:
            manifest.require_sizes(folder, entries)
            status = "sizes match"
        if is_verified and (hashed := manifest.verify(folder)) is not None:
            rate = hashed / (time.perf_counter() - began) / 1e9
            status = f"verified, {rate:.2f} GB/s"
    except config_lib.DamagedError as error:
        if not folder.exists():  # its run has deleted it meanwhile
            raise FileNotFoundError(str(folder)) from error
        status, problem = "DAMAGED", str(error)
    return Row(folder, size, age, _metrics(folder), status, problem)


def _seconds_since(folder: epath.Path) -> float:
    return time.time() - folder.stat().mtime


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _metrics(folder: epath.Path) -> Mapping[str, float]:
    try:
        metrics = manager.read_metadata(folder).get("metrics", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return {k: v for k, v in metrics.items() if isinstance(v, int | float)}
