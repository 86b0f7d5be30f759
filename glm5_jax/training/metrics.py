"""What a run reports: metrics.jsonl, an object a logged step; and a line to look at."""

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import tqdm
from absl import logging

_SECONDS_BETWEEN_LINES = 10.0
# What the progress bar or log line shows, under which name, in which format.
_SHOWN = (
    ("train/loss", "loss", ".4f"),
    ("eval/bits_per_byte", "bits/byte", ".3f"),
    ("train/grad_norm", "grad norm", ".3g"),
    ("optim/learning_rate", "lr", ".2e"),
    ("perf/tokens_per_second", "tok/s", ",.0f"),
)
_SHOWN_RL = (  # where the loss, whose gradient alone means something, is next to 0
    ("rollout/reward", "reward", ".3f"),
    ("eval/success", "success", ".1%"),
    ("rl/logprob_gap", "gap", ".1e"),
    ("train/grad_norm", "grad norm", ".3g"),
    ("perf/sampled_tokens_per_second", "sampled tok/s", ",.0f"),
)


class MetricsWriter:
    """Appends to WORKDIR/metrics.jsonl and shows progress; process 0 only."""

    def __init__(
        self, workdir: str | os.PathLike[str], total_steps: int, start_step: int = 0
    ) -> None:
        """Makes the file, or takes up the one that is there.

        A run that died had logged steps after its last checkpoint; they will come
        again, so the lines after `start_step` go, and each step stands there once.

        Args:
            workdir: an existing folder.
            total_steps: of the whole run.
            start_step: updates done: 0, or the step of the restored checkpoint.
        """
        self._total_steps, self._last_step = total_steps, start_step
        self.before: dict[str, Any] = {}  # the last line of the start before this one
        self._shown: dict[str, str] = {}
        self._next_line = 0.0
        self._is_primary = jax.process_index() == 0
        if not self._is_primary:
            return
        self._path = pathlib.Path(workdir) / "metrics.jsonl"
        if self._path.exists():
            self.before = (read(self._path) or [{}])[-1]
            _truncate(self._path, start_step)
        self._path.touch()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=total_steps, initial=start_step, unit="step", dynamic_ncols=True
            )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs one step; all that belongs to it comes in one call.

        Args:
            step: updates done, larger than at the call before.
            metrics: numbers or arrays of one number, by path. What is not finite
                becomes null: JSON has no NaN.
        """
        if not self._is_primary:
            return
        assert step > self._last_step, f"step {step} comes after {self._last_step}"
        self._last_step = step
        values = {name: _number(value) for name, value in metrics.items()}
        # Opened for each line: a mounted bucket gets what is written with the close.
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        self._show(step, values)

    def rewind(self, step: int) -> None:
        """Drops the lines after a step that the run has been rolled back to."""
        self._last_step = step
        if not self._is_primary:
            return
        _truncate(self._path, step)
        if self._bar is not None:
            self._bar.reset(self._total_steps)
            self._bar.update(step)

    def close(self) -> None:
        """Closes the bar."""
        if self._is_primary and self._bar is not None:
            self._bar.close()

    def _show(self, step: int, values: Mapping[str, float | int | None]) -> None:
        for name, label, form in _SHOWN_RL if "rollout/reward" in values else _SHOWN:
            if name in values:
                value = values[name]
                self._shown[label] = "nan" if value is None else format(value, form)
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() >= self._next_line or step >= self._total_steps:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            shown = ", ".join(
                f"{label} {value}" for label, value in self._shown.items()
            )
            logging.info("step %d of %d: %s", step, self._total_steps, shown)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a metrics.jsonl; a line cut off by a crash is left out."""
    records = []
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            logging.warning("%s: skipping half a line: %r", path, line[:80])
    return records


def _truncate(path: pathlib.Path, step: int) -> None:
    """Drops the lines after a step; the new file replaces the old in one go."""
    kept = [record for record in read(path) if record["step"] <= step]
    new = path.with_suffix(".tmp")
    new.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
    new.replace(path)


def _number(value: Any) -> float | int | None:
    if isinstance(value, int):
        return value
    number = value.item() if hasattr(value, "item") else float(value)
    return number if math.isfinite(number) else None
