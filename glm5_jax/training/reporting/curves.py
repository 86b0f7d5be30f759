"""Draws curves over the steps of runs, a panel at a time."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.ticker
import numpy as np

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#059669", "#6b7280"
COLOURS = (
    *(BLUE, ORANGE, GREEN, "#7c3aed", "#db2777"),
    *("#0891b2", "#ca8a04", "#991b1b", "#84cc16", "#111827"),
)
_NUM_NOISY = 60  # a curve with more points is pale, with its running mean on top
Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Series:
    """A metric as a line."""

    metric: str
    label: str
    colour: str
    band: tuple[str, ...] = ()  # the metrics of its lower and upper limit
    is_sparse: bool = False  # few points: marked, the last one written out if alone
    is_exact: bool = False  # no noise to average away


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines with one unit."""

    title: str
    unit: str
    series: tuple[Series, ...]
    is_log: bool = False
    reach: float | None = None  # the axis always shows 0 and this value


def curve(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values of a metric, without absent and null values."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return steps, values


def draw(
    axes: matplotlib.axes.Axes, panel: Panel, records: Sequence[Sequence[Record]]
) -> None:
    """Draws a panel.

    Args:
        axes: of an empty panel.
        panel: what it shows.
        records: of each series: the lines of its run.
    """
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=GREY)
    axes.set_ylabel(panel.unit, color=GREY)
    axes.tick_params(colors=GREY, length=0)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    is_alone = sum(series.is_sparse for series in panel.series) == 1
    everything = []
    for series, lines in zip(panel.series, records, strict=True):
        steps, values = curve(lines, series.metric)
        everything.append(values)
        if len(steps):
            _draw_curve(axes, steps, values, series)
        if len(steps) and series.is_sparse and is_alone:
            _write_last(axes, steps, values, series.colour)
        if len(steps) and series.band:
            (steps, low), (_, high) = (curve(lines, name) for name in series.band)
            axes.fill_between(
                steps, low, high, color=series.colour, alpha=0.18, linewidth=0
            )
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, reverse=True)
    if panel.reach is not None:
        axes.update_datalim([(0, 0), (0, panel.reach)], updatex=False)
        axes.autoscale_view()
    if panel.is_log and (np.concatenate(everything) > 0).any():
        axes.set_yscale("log", nonpositive="mask")
        ticker = matplotlib.ticker
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6))


def _draw_curve(
    axes: matplotlib.axes.Axes, steps: np.ndarray, values: np.ndarray, series: Series
) -> None:
    is_noisy = len(steps) > _NUM_NOISY and not (series.is_sparse or series.is_exact)
    if is_noisy:
        axes.plot(steps, values, color=series.colour, alpha=0.25, linewidth=0.8)
        values = _running_mean(values, len(values) // 40)
    axes.plot(
        steps,
        values,
        color=series.colour,
        linewidth=1.8,
        marker="o" if series.is_sparse or len(steps) == 1 else None,
        markersize=5,
        label=series.label,
    )


def _write_last(
    axes: matplotlib.axes.Axes, steps: np.ndarray, values: np.ndarray, colour: str
) -> None:
    axes.annotate(
        f"{values[-1]:.3f}",
        (steps[-1], values[-1]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="right",
        color=colour,
        fontweight="bold",
    )
    axes.margins(y=0.15)


def _running_mean(values: np.ndarray, half_width: int) -> np.ndarray:
    """Returns means over 2 half_width + 1 values; over fewer at the ends."""
    window = np.ones(2 * half_width + 1)
    count = np.convolve(np.ones_like(values), window, mode="same")
    return np.convolve(values, window, mode="same") / count
