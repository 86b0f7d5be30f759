"""The metrics of a run: metrics.jsonl, with one object for each logged step."""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from glm5_jax import files
from glm5_jax.training.reporting import progress, records
from glm5_jax.training.reporting import trackers as trackers_lib

read, finite = records.read, records.finite  # beside what writes them


class MetricsWriter:
    """Appends to WORKDIR/metrics.jsonl and shows progress; process 0 only."""

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        total_steps: int,
        start_step: int = 0,
        trackers: Sequence[trackers_lib.Tracker] = (),
    ) -> None:
        """Makes the file, or opens that of an earlier start.

        A run that was killed has logged steps after its last checkpoint, which it does
        again. The lines after `start_step` are dropped, so that each step has one line.

        Args:
            workdir: an existing folder.
            total_steps: steps of the whole run.
            start_step: steps done: 0, or the step of the restored checkpoint.
            trackers: get each step as well; `close` closes them.
        """
        self._last_step, self._trackers = start_step, trackers
        self.before: dict[str, Any] = {}  # the last line of the previous start
        self._is_primary = jax.process_index() == 0
        if not self._is_primary:
            return
        self._path = pathlib.Path(workdir) / "metrics.jsonl"
        if self._path.exists():
            self.before = (read(self._path) or [{}])[-1]
            _truncate(self._path, start_step)
        self._path.touch()
        self._progress = progress.Progress(total_steps, start_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs all metrics of one step.

        Args:
            step: steps done, more than at the last call.
            metrics: numbers or arrays of one number, by path. A number that is not
                finite becomes null, since JSON has no NaN.
        """
        if not self._is_primary:
            return
        assert step > self._last_step, f"step {step} comes after {self._last_step}"
        self._last_step = step
        values = {name: _number(value) for name, value in metrics.items()}
        # Opened for each line: a mounted bucket gets the content when a file is closed.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for tracker in self._trackers:
            tracker.write(step, values)
        self._progress.show(step, values)

    def rewind(self, step: int) -> None:
        """Drops the lines after a step that the run has been rolled back to."""
        self._last_step = step
        if not self._is_primary:
            return
        _truncate(self._path, step)
        for tracker in self._trackers:
            tracker.rewind(step)
        self._progress.rewind(step)

    def close(self) -> None:
        """Closes the trackers and the progress line."""
        if self._is_primary:
            for tracker in self._trackers:
                tracker.close()
            self._progress.close()


def _truncate(path: pathlib.Path, step: int) -> None:
    """Drops the lines after a step."""
    kept = [record for record in read(path) if record["step"] <= step]
    files.write_text(path, "".join(json.dumps(r) + "\n" for r in kept))


def _number(value: Any) -> float | int | None:
    if isinstance(value, int):
        return value
    number = value.item() if hasattr(value, "item") else float(value)
    return number if math.isfinite(number) else None
