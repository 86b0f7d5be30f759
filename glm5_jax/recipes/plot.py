"""report.png: a pipeline on one picture."""

import pathlib
from collections.abc import Mapping, Sequence

import matplotlib.axes
import matplotlib.figure
import matplotlib.ticker
import numpy as np

_COLOURS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#0891b2")
_GREY, _PALE = "#6b7280", "#e5e7eb"
_HEIGHT, _WIDTH = 3.6, 11.0  # inches; the height is a row's

Curve = tuple[np.ndarray, np.ndarray]  # millions of tokens, loss


def draw(
    losses: Mapping[str, Curve],
    figures: Mapping[str, Mapping[str, Mapping[str, float]]],
    out_png: pathlib.Path,
) -> None:
    """Draws the loss over all stages on top, and each kind of figure below.

    Args:
      losses: of each stage that predicts text; tokens count from its own start.
      figures: by kind and line: the value after each stage where it was measured.
      out_png: the picture to write.
    """
    num_rows = 1 + -(-len(figures) // 2)
    figure = matplotlib.figure.Figure(
        figsize=(_WIDTH, _HEIGHT * num_rows), layout="constrained"
    )
    grid = figure.add_gridspec(num_rows, 2)
    top = figure.add_subplot(grid[0, :])
    _style(top, "Loss of the next token", "nats per token")
    top.set_xlabel("tokens, millions", color=_GREY)
    begin = 0.0
    for i, (stage, (tokens, loss)) in enumerate(losses.items()):
        top.axvline(begin, color=_PALE)
        colour = _COLOURS[i % len(_COLOURS)]
        top.plot(begin + tokens, loss, color=colour, linewidth=1, label=stage)
        begin += float(tokens[-1])
    top.legend(frameon=False)
    for i, (kind, lines) in enumerate(figures.items()):
        axes = figure.add_subplot(grid[1 + i // 2, i % 2])
        _style(axes, kind, "share")
        stages = _in_order([stage for values in lines.values() for stage in values])
        for j, (line, values) in enumerate(lines.items()):
            places = [stages.index(stage) for stage in values]
            colour = _COLOURS[j % len(_COLOURS)]
            axes.plot(places, [*values.values()], "o-", color=colour, label=line)
        names = [stage.replace("_", "\n") for stage in stages]
        axes.set_xticks(range(len(stages)), names)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("after stage", color=_GREY)
        axes.legend(frameon=False)
    figure.savefig(out_png, dpi=110)


def _style(axes: matplotlib.axes.Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(unit, color=_GREY)
    axes.tick_params(colors=_GREY, length=0)
    axes.grid(color=_PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _in_order(names: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(names)]
