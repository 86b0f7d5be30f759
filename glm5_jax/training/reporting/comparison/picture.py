"""Draws curves of several runs over each other, a panel for each metric."""

import math
import pathlib
from collections.abc import Sequence

import matplotlib.figure

from glm5_jax import files
from glm5_jax.training.reporting import curves
from glm5_jax.training.reporting.comparison import runs as runs_lib

_PANEL = (5.6, 4.2)  # inches
_NUM_COLUMNS = 2


def draw(
    runs: Sequence[runs_lib.Run], metrics: Sequence[str], path: pathlib.Path
) -> None:
    """Writes the picture; each of ten runs has its colour in all panels.

    Args:
        runs: the runs.
        metrics: at least one; each is in at least one run.
        path: file to write; its suffix is the format.
    """
    num_columns = min(len(metrics), _NUM_COLUMNS)
    num_rows = math.ceil(len(metrics) / num_columns)
    size = _PANEL[0] * num_columns, _PANEL[1] * num_rows
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    for i, metric in enumerate(metrics):
        # The first run is drawn last, above the others; the legend begins with it.
        having = [(j, run) for j, run in enumerate(runs) if run.curve(metric)][::-1]
        series = tuple(
            curves.Series(
                metric,
                run.name,
                curves.COLOURS[j % len(curves.COLOURS)],
                is_sparse=metric.startswith("eval/"),
            )
            for j, run in having
        )
        panel = curves.Panel(title=metric, unit="", series=series)
        axes = figure.add_subplot(num_rows, num_columns, i + 1)
        curves.draw(axes, panel, [run.lines for _, run in having])
    files.write_atomically(path, lambda new: figure.savefig(new, dpi=120))
