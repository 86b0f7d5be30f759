"""loss.png: the curves of a run on one page."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker
import numpy as np
from matplotlib import layout_engine

from glm5_jax.training import metrics

_BLUE, _ORANGE, _GREEN, _GREY = "#2563eb", "#ea580c", "#059669", "#6b7280"
_NUM_NOISY = 60  # a curve of more points is drawn pale, its running mean on top


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    unit: str
    series: tuple[tuple[str, str, str], ...]  # metric, label, colour
    is_log: bool = False
    is_sparse: bool = False  # few points: marked, the last one written out
    is_exact: bool = False  # no noise to average away


_ROWS = (
    (
        _Panel(
            title="Training loss",
            unit="nats per token",
            series=(
                ("train/loss", "total", _GREY),
                ("train/mtp_loss", "multi-token prediction", _ORANGE),
                ("train/lm_loss", "next token", _BLUE),
            ),
        ),
        _Panel(
            title="Held-out text",
            unit="bits per byte",
            series=(("eval/bits_per_byte", "held-out", _GREEN),),
            is_sparse=True,
        ),
    ),
    (
        _Panel(
            title="Indexer: KL to the attention",
            unit="nats per query, all layers",
            series=(("train/indexer_kl", "indexer", _ORANGE),),
            is_log=True,
        ),
        _Panel(
            title="Gradient norm",
            unit="L2 norm",
            series=(("train/grad_norm", "gradient", _BLUE),),
            is_log=True,
        ),
        _Panel(
            title="Learning rate",
            unit="per update",
            series=(("optim/learning_rate", "learning rate", _GREY),),
            is_exact=True,
        ),
    ),
)
_NUM_COLUMNS = 6  # of the grid: 1, 2 and 3 panels in a row divide it


def plot_losses(
    metrics_path: str | os.PathLike[str], out_png: str | os.PathLike[str]
) -> None:
    """Draws the losses above, the signals to diagnose them with below.

    What the file lacks is left out, panel by panel and row by row.

    Args:
        metrics_path: a metrics.jsonl.
        out_png: the picture to write.
    """
    records = metrics.read(metrics_path)
    rows = [[p for p in row if _is_in(records, p)] for row in _ROWS]
    rows = [row for row in rows if row] or [[_ROWS[0][0]]]
    heights = [4.2, 2.6][: len(rows)]
    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)  # inches
    figure = matplotlib.figure.Figure(figsize=(11, sum(heights)), layout=layout)
    grid = figure.add_gridspec(len(rows), _NUM_COLUMNS, height_ratios=heights)
    for i, row in enumerate(rows):
        width = _NUM_COLUMNS // len(row)
        for j, panel in enumerate(row):
            axes = figure.add_subplot(grid[i, j * width : (j + 1) * width])
            _draw(axes, panel, records)
    figure.savefig(out_png, dpi=120)


def _is_in(records: Sequence[Mapping[str, Any]], panel: _Panel) -> bool:
    return any(len(_curve(records, name)[0]) for name, _, _ in panel.series)


def _curve(
    records: Sequence[Mapping[str, Any]], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, without the absent and the null (not finite)."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return steps, values


def _draw(
    axes: matplotlib.axes.Axes, panel: _Panel, records: Sequence[Mapping[str, Any]]
) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=_GREY)
    axes.set_ylabel(panel.unit, color=_GREY)
    axes.tick_params(colors=_GREY, length=0)
    axes.grid(color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    curves = [(_curve(records, name), label, c) for name, label, c in panel.series]
    for (steps, values), label, colour in curves:
        if len(steps):
            _draw_curve(axes, steps, values, panel, label, colour)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, reverse=True)
    everything = np.concatenate([values for (_, values), _, _ in curves])
    if panel.is_log and len(everything) and everything.min() > 0:
        axes.set_yscale("log")
        ticker = matplotlib.ticker
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6))


def _draw_curve(
    axes: matplotlib.axes.Axes,
    steps: np.ndarray,
    values: np.ndarray,
    panel: _Panel,
    label: str,
    colour: str,
) -> None:
    is_noisy = len(steps) > _NUM_NOISY and not (panel.is_sparse or panel.is_exact)
    marker = "o" if panel.is_sparse or len(steps) == 1 else None
    if is_noisy:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        values = _running_mean(values, len(values) // 40)
    axes.plot(
        *(steps, values),
        color=colour,
        linewidth=1.8,
        marker=marker,
        markersize=5,
        label=label,
    )
    if panel.is_sparse:
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
    """Mean over 2 half_width + 1 values, over those that exist at the ends."""
    window = np.ones(2 * half_width + 1)
    count = np.convolve(np.ones_like(values), window, mode="same")
    return np.convolve(values, window, mode="same") / count
