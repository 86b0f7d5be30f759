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

from glm5_jax.training.reporting import metrics

_BLUE, _ORANGE, _GREEN, _GREY = "#2563eb", "#ea580c", "#059669", "#6b7280"
_NUM_NOISY = 60  # a curve with more points is pale, with its running mean on top


@dataclasses.dataclass(frozen=True)
class _Series:
    metric: str
    label: str
    colour: str
    band: tuple[str, ...] = ()  # the metrics of its lower and upper limit
    is_sparse: bool = False  # few points: marked, the last one written out
    is_exact: bool = False  # no noise to average away


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    unit: str
    series: tuple[_Series, ...]
    is_log: bool = False
    reach: float | None = None  # the axis always shows 0 and this value


_GRAD_NORM = _Panel(
    title="Gradient norm",
    unit="L2 norm",
    series=(_Series("train/grad_norm", "gradient", _BLUE),),
    is_log=True,
)
_LEARNING_RATE = _Panel(
    title="Learning rate",
    unit="per update",
    series=(_Series("optim/learning_rate", "rate", _GREY, is_exact=True),),
)
_TEXT_ROWS = (
    (
        _Panel(
            title="Training loss",
            unit="nats per token",
            series=(
                _Series("train/loss", "total", _GREY),
                _Series("train/mtp_loss", "multi-token prediction", _ORANGE),
                _Series("train/lm_loss", "next token", _BLUE),
            ),
        ),
        _Panel(
            title="Held-out text",
            unit="bits per byte",
            series=(_Series("eval/bits_per_byte", "held-out", _GREEN, is_sparse=True),),
        ),
    ),
    (
        _Panel(
            title="Indexer: KL to the attention",
            unit="nats per query, all layers",
            series=(_Series("train/indexer_kl", "indexer", _ORANGE),),
            is_log=True,
        ),
        _GRAD_NORM,
        _LEARNING_RATE,
    ),
)
_INTERVAL = ("eval/success_low", "eval/success_high")
_RL_ROWS = (  # without the loss: its value is 0 as long as all ratios are 1
    (
        _Panel(
            title="Reward, and success on held-out tasks",
            unit="mean reward, share solved",
            series=(
                _Series("rollout/reward", "reward of rollouts", _BLUE),
                _Series(
                    "eval/success", "held-out, 95%", _GREEN, _INTERVAL, is_sparse=True
                ),
            ),
            reach=1.0,
        ),
        _Panel(
            title="Log-probs: trainer against engine",
            unit="|difference|, nats per sampled token",
            series=(
                _Series("rl/logprob_gap", "mean", _BLUE),
                _Series("rl/logprob_gap_max", "largest", _ORANGE),
            ),
            is_log=True,
        ),
    ),
    (
        _Panel(
            title="Tokens without a gradient",
            unit="share of sampled tokens",
            series=(
                _Series("rl/clip_fraction", "clipped", _BLUE),
                _Series("rl/masked_fraction", "masked", _ORANGE),
            ),
            reach=0.01,
        ),
        _Panel(
            title="Entropy",
            unit="nats per sampled token",
            series=(_Series("rl/entropy", "policy", _BLUE),),
        ),
        _Panel(
            title="Length of a response",
            unit="tokens per turn",
            series=(_Series("rollout/response_length", "mean", _BLUE),),
        ),
    ),
    (
        _GRAD_NORM,
        _LEARNING_RATE,
        _Panel(
            title="Time",
            unit="seconds",
            series=(
                _Series("perf/step_seconds", "step", _GREY),
                _Series("perf/rollout_seconds", "of it rollouts", _BLUE),
            ),
            is_log=True,
        ),
    ),
)
_NUM_COLUMNS = 6  # of the grid: 1, 2 and 3 panels in a row divide it


def plot_losses(
    metrics_path: str | os.PathLike[str], out_png: str | os.PathLike[str]
) -> None:
    """Draws the losses on top and the signals that help to diagnose them below.

    A panel without data is skipped, and a row without panels.

    Args:
        metrics_path: a metrics.jsonl.
        out_png: the picture to write.
    """
    records = metrics.read(metrics_path)
    is_rl = any("rollout/reward" in record for record in records)
    panels = _RL_ROWS if is_rl else _TEXT_ROWS
    rows = [[p for p in row if _is_in(records, p)] for row in panels]
    rows = [row for row in rows if row] or [[panels[0][0]]]
    heights = [4.2, 2.6, 2.6][: len(rows)]
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
    return any(len(_curve(records, s.metric)[0]) for s in panel.series)


def _curve(
    records: Sequence[Mapping[str, Any]], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values of a metric, without absent and null values."""
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
    curves = [_curve(records, series.metric) for series in panel.series]
    for series, (steps, values) in zip(panel.series, curves, strict=True):
        if len(steps):
            _draw_curve(axes, steps, values, series)
        if len(steps) and series.band:
            (steps, low), (_, high) = (_curve(records, name) for name in series.band)
            axes.fill_between(
                steps, low, high, color=series.colour, alpha=0.18, linewidth=0
            )
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, reverse=True)
    everything = np.concatenate([values for _, values in curves])
    if panel.reach is not None:
        axes.update_datalim([(0, 0), (0, panel.reach)], updatex=False)
        axes.autoscale_view()
    if panel.is_log and (everything > 0).any():
        axes.set_yscale("log", nonpositive="mask")
        ticker = matplotlib.ticker
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=6))


def _draw_curve(
    axes: matplotlib.axes.Axes, steps: np.ndarray, values: np.ndarray, series: _Series
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
    if series.is_sparse:
        axes.annotate(
            f"{values[-1]:.3f}",
            (steps[-1], values[-1]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="right",
            color=series.colour,
            fontweight="bold",
        )
        axes.margins(y=0.15)


def _running_mean(values: np.ndarray, half_width: int) -> np.ndarray:
    """Returns means over 2 half_width + 1 values; over fewer at the ends."""
    window = np.ones(2 * half_width + 1)
    count = np.convolve(np.ones_like(values), window, mode="same")
    return np.convolve(values, window, mode="same") / count
