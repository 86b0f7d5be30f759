"""Finds what differs between runs: settings, and figures at the same steps."""

import dataclasses
import difflib
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from glm5_jax import config as config_lib
from glm5_jax.training.reporting.comparison import runs as runs_lib

Run, Number = runs_lib.Run, runs_lib.Number
Kind = Literal["final", "best", "median"]
_LOSSES = ("train/lm_loss", "rollout/reward")
_HELD_OUT = ("eval/bits_per_byte", "eval/success")
_TIMES = ("perf/tokens_per_second", runs_lib.SECONDS)
# Words in a metric's name that say which of two values is better.
_LOWER = re.compile(r"(^|[/_])(loss|bits_per_byte|kl|perplexity)($|[/_])")
_HIGHER = re.compile(r"(^|[/_])(success|reward|accuracy|recall)($|[/_])")
_BOUND = re.compile(r"_(low|high)$")  # of an interval
_MAX_NAMED = 3  # names in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A number of each run; None where a run has none."""

    metric: str
    kind: Kind
    values: tuple[Number | None, ...]
    steps: tuple[int | None, ...]  # of each run: where the value was measured
    is_aligned: bool = True  # False: the runs measured it at no common step

    @property
    def differences(self) -> tuple[Number | None, ...]:
        """The differences to the first run; None where they would say nothing."""
        first, *others = self.values
        if first is None or not self.is_aligned:
            return (None,) * len(self.values)
        return (None, *(None if x is None else x - first for x in others))


def settings(runs: Sequence[Run]) -> list[str]:
    """Returns the names of the settings that differ, in the order of the config.

    What runs ran on is known when they end; it counts where all have.
    """
    absent = object()
    differing = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        first, *others = (run.settings.get(name, absent) for run in runs)
        is_known = name not in runs_lib.RAN_ON or absent not in (first, *others)
        if is_known and any(other != first for other in others):
            differing.append(name)
    return differing


def common_step(runs: Sequence[Run]) -> int | None:
    """Returns the last step that all runs have logged; None if there is none."""
    return _last_common([[line["step"] for line in run.lines] for run in runs])


def choose(runs: Sequence[Run], named: Sequence[str]) -> list[str]:
    """Returns the metrics to show: those named, or else the usual that all runs have.

    Raises:
        InputError: has a line for every metric that no run has.
    """
    known = sorted({name for run in runs for line in run.lines for name in line})
    missing = [m for m in named if not any(run.curve(m) for run in runs)]
    if missing:
        raise config_lib.InputError("\n".join(_unknown(m, known) for m in missing))
    measured = [name for name in known if name.startswith("eval/") and better(name)]
    usual = [*measured, *_LOSSES, *_TIMES]
    return [*dict.fromkeys(named)] or [
        m for m in usual if all(r.curve(m) for r in runs)
    ]


def choose_curves(runs: Sequence[Run], named: Sequence[str]) -> list[str]:
    """Returns the metrics to draw: those named, or else losses and held-out figures."""
    usual = [m for m in _LOSSES + _HELD_OUT if any(run.curve(m) for run in runs)]
    return [*dict.fromkeys(named)] or usual or ["train/loss"]


def of(runs: Sequence[Run], metrics: Sequence[str]) -> list[Figure]:
    """Returns the figures of metrics, and the steps that each run has done."""
    last = tuple(run.lines[-1]["step"] for run in runs)
    steps = Figure(metric="steps", kind="final", values=last, steps=last)
    return [*(figure for metric in metrics for figure in _of(runs, metric)), steps]


def better(metric: str) -> Callable[..., Any] | None:
    """Returns `min` or `max`, or None where no value is better than another."""
    if _BOUND.search(metric):
        return None
    return min if _LOWER.search(metric) else max if _HIGHER.search(metric) else None


def _of(runs: Sequence[Run], metric: str) -> Iterator[Figure]:
    """Yields a metric's figures up to the last step at which all have measured it."""
    curves = [run.curve(metric) for run in runs]
    end = _last_common([curve for curve in curves if curve])
    is_aligned = end is not None
    seen = [{s: v for s, v in c.items() if not is_aligned or s <= end} for c in curves]

    def figure(
        kind: Kind, steps: Sequence[int | None], values: Sequence[Number | None]
    ) -> Figure:
        return Figure(
            metric=metric,
            kind=kind,
            values=tuple(values),
            steps=tuple(steps),
            is_aligned=is_aligned,
        )

    def at(steps: Sequence[int | None]) -> list[Number | None]:
        return [None if s is None else c[s] for c, s in zip(seen, steps, strict=True)]

    last = [max(c, default=None) for c in seen]
    if metric.startswith("perf/"):  # the speed of a single step says little
        medians = [statistics.median(c.values()) if c else None for c in seen]
        yield figure("median", last, medians)
        return
    yield figure("final", last, at(last))
    if is_aligned and (best := better(metric)):
        steps = [best(c, key=c.get, default=None) for c in seen]
        yield figure("best", steps, at(steps))


def _last_common(steps: Sequence[Sequence[int] | dict[int, Number]]) -> int | None:
    return max(set.intersection(*map(set, steps)), default=None)


def _unknown(metric: str, known: Sequence[str]) -> str:
    """Returns the message about a metric that no run has, with the nearest names."""
    word = metric.rpartition("/")[2]
    near = [name for name in known if word in name]
    near += difflib.get_close_matches(metric, known)
    names = ", ".join([*dict.fromkeys(near)][:_MAX_NAMED])
    guess = f" Near it are {names}." if near else " metrics.jsonl has their names."
    return f"no run has the metric {metric!r}.{guess}"
