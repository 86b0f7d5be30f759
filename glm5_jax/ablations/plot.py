"""The picture of a study: curves over tokens with bands, or a value for each arm."""

import math
import pathlib
from collections.abc import Sequence

import matplotlib
import matplotlib.axes
import matplotlib.figure
import numpy as np

from glm5_jax import intervals
from glm5_jax.ablations import results
from glm5_jax.ablations import study as study_lib

_GREY = "#6b7280"
_PANEL = (5.6, 4.2)  # inches


def draw(
    study: study_lib.Study, found: Sequence[results.Result], out_png: pathlib.Path
) -> None:
    """Draws a panel for each metric that has a plot; the first if none has.

    Bands and bars are 95% t intervals over seeds.
    """
    metrics = [m for m in study.metrics if m.plot] or [study.metrics[0]]
    figure = matplotlib.figure.Figure(
        figsize=(_PANEL[0] * len(metrics), _PANEL[1]), layout="constrained"
    )
    for i, metric in enumerate(metrics):
        axes = figure.add_subplot(1, len(metrics), i + 1)
        _style(axes, metric)
        if metric.plot == "curve":
            _draw_curves(axes, found, metric)
        elif study.x_label:
            _draw_against(axes, found, metric, study.x_label)
        else:
            _draw_arms(axes, found, metric)
    figure.savefig(out_png, dpi=110)


def _style(axes: matplotlib.axes.Axes, metric: study_lib.Metric) -> None:
    axes.set_title(metric.label, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(metric.unit or metric.label, color=_GREY)
    axes.tick_params(colors=_GREY, length=0)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _draw_curves(
    axes: matplotlib.axes.Axes,
    found: Sequence[results.Result],
    metric: study_lib.Metric,
) -> None:
    """Draws the mean over seeds of each arm, at the steps that all seeds have."""
    per_step = min((r.tokens_per_step for r in found), default=0)
    axes.set_xlabel("tokens, millions" if per_step else "step", color=_GREY)
    for i, result in enumerate(found):
        curves = [
            dict(zip(*results.curve(lines, metric.key), strict=True))
            for lines in result.records
        ]
        steps = sorted(set.intersection(*map(set, curves)))
        if not steps:
            continue
        bands = [intervals.mean_interval([c[s] for c in curves]) for s in steps]
        x = np.array(steps) * (result.tokens_per_step / 1e6 if per_step else 1)
        mean, low, high, _ = np.array(bands, float).T
        axes.plot(x, mean, color=f"C{i}", linewidth=1.8, label=result.arm.name)
        axes.fill_between(x, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
    if axes.lines:
        axes.legend(frameon=False)


def _bars(
    found: Sequence[results.Result], metric: study_lib.Metric
) -> list[tuple[results.Result, float, float]]:
    """Returns arms with the mean and the half width of the interval, 0 of one seed."""
    bars = []
    for result in found:
        if values := list(result.values(metric).values()):
            x = intervals.mean_interval(values)
            half = 0.0 if math.isnan(x.low) else x.high - x.mean
            bars.append((result, x.mean, half))
    return bars


def _draw_against(
    axes: matplotlib.axes.Axes,
    found: Sequence[results.Result],
    metric: study_lib.Metric,
    label: str,
) -> None:
    """Draws the value of each arm against its quantity."""
    axes.set_xlabel(label, color=_GREY)
    bars = [
        (result.arm.x, mean, half)
        for result, mean, half in _bars(found, metric)
        if result.arm.x is not None
    ]
    if not bars:
        return
    x, means, halves = np.array(sorted(bars)).T
    axes.errorbar(x, means, halves, color="C0", marker="o", capsize=4, linewidth=1.8)
    if x[0] > 0 and x[-1] > 8 * x[0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.minorticks_off()


def _draw_arms(
    axes: matplotlib.axes.Axes,
    found: Sequence[results.Result],
    metric: study_lib.Metric,
) -> None:
    """Draws a point with its interval for each arm, one below the other."""
    bars = _bars(found, metric)
    axes.set_xlabel(metric.unit or metric.label, color=_GREY)
    axes.set_ylabel("")
    for i, (_, mean, half) in enumerate(bars):
        axes.errorbar(mean, i, xerr=half, color="C0", marker="o", capsize=4)
    axes.set_yticks(range(len(bars)), [result.arm.name for result, _, _ in bars])
    axes.invert_yaxis()
