"""The table and the picture of staleness_grid.py."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np
import rl_curves

from glm5_jax import intervals

STYLES = dict(zip(("dis", "pop", "tis", "none"), rl_curves.STYLES, strict=False))
COLUMNS = (
    *("staleness", "objective", "seeds", "start", "held-out success", "95% interval"),
    *("range", "masked", "gap, mean", "gradient norm, max"),
)
_APART = 0.09  # of two objectives, in places of a staleness

Record = dict[str, Any]  # a line of results.jsonl


def table(records: Sequence[Record]) -> str:
    """Returns a Markdown table with a row for each staleness and objective.

    Success is the mean over seeds of the last evaluation, with Student's interval.
    """
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for staleness in _staleness(records):
        for objective in _objectives(records):
            runs = _of(records, staleness, objective)
            if runs:
                lines.append([str(staleness), objective, *_cells(runs)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def draw(records: Sequence[Record]) -> matplotlib.figure.Figure:
    """Draws success against updates for each staleness, and the ends together."""
    figure = matplotlib.figure.Figure(figsize=(11, 6.6), layout="constrained")
    above, below = figure.subfigures(2, 1)
    known = _staleness(records)
    for place, staleness in zip(
        above.subplots(1, len(known), sharey=True, squeeze=False)[0],
        known,
        strict=True,
    ):
        _draw_curves(place, records, staleness)
    ends, masked = below.subplots(1, 2)
    _draw_ends(ends, records, lambda run: run["success"])
    _draw_ends(masked, records, lambda run: 100 * run["masked"])
    _title(ends, "Success at the end, 95% interval")
    _title(masked, "Masked or capped tokens, %")
    ends.set_ylim(0, 1.02)
    handles, labels = ends.get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, loc="outside lower center", ncols=len(labels)
    )
    return figure


def _cells(runs: Sequence[Record]) -> list[str]:
    success = [run["success"] for run in runs]
    found = intervals.mean_interval(success)
    return [
        str(len(runs)),
        f"{np.mean([run['start'] for run in runs]):.0%}",
        f"{found.mean:.1%}",
        f"{max(found.low, 0):.1%} to {min(found.high, 1):.1%}" if len(runs) > 1 else "",
        f"{min(success):.1%} to {max(success):.1%}",
        f"{np.mean([run['masked'] for run in runs]):.2%}",
        f"{np.mean([run['gap'] for run in runs]):.2g}",
        f"{max(run['grad_norm_max'] for run in runs):.2g}",
    ]


def _draw_curves(
    axes: matplotlib.axes.Axes, records: Sequence[Record], staleness: int
) -> None:
    """Draws mean and range over seeds of the policy's success, by its version.

    A step's rollouts are of the version `staleness` before it, so their rewards tell
    how good that version was; the last point is the evaluation at the end.
    """
    for objective in _objectives(records):
        runs = _of(records, staleness, objective)
        if not runs:
            continue
        values = np.stack([_curve(run) for run in runs])
        steps, style = runs[0]["settings"]["steps"], STYLES[objective]
        versions = np.arange(values.shape[1])
        mean, line = values.mean(axis=0), {**style, "marker": ""}
        axes.plot(versions, mean, **line, linewidth=1.6)
        axes.plot(steps, np.mean([run["success"] for run in runs]), **style)
        limits = values.min(axis=0), values.max(axis=0)
        axes.fill_between(
            versions, *limits, color=style["color"], alpha=0.1, linewidth=0
        )
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("updates of the policy", color=rl_curves.GREY)
    _title(axes, f"Success, staleness {staleness}")
    rl_curves.clean(axes)


def _curve(run: Record) -> np.ndarray:
    """Returns the reward of each version, smoothed as those of rl_curves.py."""
    return rl_curves.smooth(np.array([run["rewards"][run["staleness"] :]]))[0]


def _draw_ends(
    axes: matplotlib.axes.Axes,
    records: Sequence[Record],
    value: Callable[[Record], float],
) -> None:
    """Draws a figure of the whole run against staleness, with Student's intervals."""
    known, objectives = _staleness(records), _objectives(records)
    for number, objective in enumerate(objectives):
        found = [
            (place, intervals.mean_interval([value(run) for run in runs]))
            for place, staleness in enumerate(known)
            if (runs := _of(records, staleness, objective))
        ]
        shift = (number - (len(objectives) - 1) / 2) * _APART
        means = [interval.mean for _, interval in found]
        spreads = [np.nan_to_num(i.high - i.mean) for _, i in found]
        axes.errorbar(
            [place + shift for place, _ in found],
            means,
            yerr=spreads,
            label=objective,
            capsize=3,
            markersize=5,
            linewidth=1.4,
            **STYLES[objective],
        )
    axes.set_xticks(range(len(known)), [str(staleness) for staleness in known])
    axes.set_xlabel("staleness, versions", color=rl_curves.GREY)
    rl_curves.clean(axes)


def _of(records: Sequence[Record], staleness: int, objective: str) -> list[Record]:
    """Returns the runs of a cell, by seed."""
    runs = [
        r
        for r in records
        if r["staleness"] == staleness and r["objective"] == objective
    ]
    return sorted(runs, key=lambda run: run["seed"])


def _staleness(records: Sequence[Record]) -> list[int]:
    return sorted({record["staleness"] for record in records})


def _objectives(records: Sequence[Record]) -> list[str]:
    found = {record["objective"] for record in records}
    return [name for name in reversed(STYLES) if name in found]


def _title(axes: matplotlib.axes.Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold")
