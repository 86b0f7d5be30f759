"""The progress line of a run: a bar in a terminal, else lines in the log."""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tqdm
from absl import logging

Values = Mapping[str, float | int | None]

LOG_COLUMNS = 64  # of a line of 80, after the log's own time
_SECONDS_BETWEEN_LINES = 10.0
# Metrics with label and format. A narrow line keeps the first rows. Of a row it shows
# the first metric that was measured.
_SHOWN = (
    (("train/lm_loss", "lm loss", ".3f"), ("train/loss", "loss", ".3f")),
    (("eval/bits_per_byte", "bits/byte", ".3f"),),
    (("perf/tokens_per_second", "tok/s", ",.0f"),),
    (("train/grad_norm", "grad norm", ".2g"),),
    (("optim/learning_rate", "lr", ".1e"),),
)
_SHOWN_RL = (  # without the loss, which is near 0: only its gradient has a meaning
    (("rollout/reward", "reward", ".3f"),),
    (("eval/success", "success", ".1%"),),
    (("rl/logprob_gap", "gap", ".1e"),),
    (("perf/sampled_tokens_per_second", "sampled tok/s", ",.0f"),),
    (("train/grad_norm", "grad norm", ".2g"),),
)


class Progress:
    """Shows the newest values of a few metrics."""

    def __init__(self, total_steps: int, start_step: int = 0) -> None:
        """Opens a bar where the output is a terminal.

        Args:
            total_steps: steps of the whole run.
            start_step: steps done.
        """
        self._total_steps = total_steps
        self._shown: dict[str, str] = {}
        self._next_line = 0.0
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=total_steps,
                initial=start_step,
                bar_format="{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}",
                dynamic_ncols=True,
            )

    def show(self, step: int, values: Values) -> None:
        """Shows the metrics of a step; a missing one keeps its last value."""
        rows = _SHOWN_RL if "rollout/reward" in values else _SHOWN
        for row in rows:
            for name, label, form in row:
                if name in values:
                    value = values[name]
                    text = "nan" if value is None else format(value, form)
                    self._shown[label] = f"{label} {text}"
                    break
        order = [label for row in rows for _, label, _ in row if label in self._shown]
        words = [self._shown[label] for label in order]
        if self._bar is not None:
            self._bar.set_postfix_str(_fitting(words, self._room()), refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() >= self._next_line or step >= self._total_steps:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            head = f"step {step} of {self._total_steps}: "
            logging.info("%s", head + _fitting(words, LOG_COLUMNS - len(head)))

    def rewind(self, step: int) -> None:
        """Goes back to a step that the run has been rolled back to."""
        if self._bar is not None:
            self._bar.reset(self._total_steps)
            self._bar.update(step)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()

    def _room(self) -> int:
        """Returns the columns that the bar leaves for metrics."""
        assert self._bar is not None
        state: dict[str, Any] = dict(self._bar.format_dict)
        columns = state["ncols"] or shutil.get_terminal_size().columns
        alone: dict[str, Any] = {**state, "postfix": None, "ncols": None}
        return columns - len(tqdm.tqdm.format_meter(**alone)) - len(", ")


def _fitting(words: Sequence[str], columns: int) -> str:
    """Returns as many of the first words as fit, and at least one."""
    ends = [len(", ".join(words[: i + 1])) for i in range(len(words))]
    fitting = [end for end in ends if end <= columns]
    return ", ".join(words[: max(len(fitting), 1)])
