"""Plots time against length, with one panel per op."""

import pathlib
from typing import Any

import matplotlib
import matplotlib.figure

COLUMNS = 3
PANEL_INCHES = (4.0, 3.0)


def save(rows: list[dict[str, Any]], path: pathlib.Path, device: str) -> None:
    """Draws times and each op's floor; marks jobs that were only compiled."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    height = -(-len(ops) // COLUMNS)
    width = min(COLUMNS, len(ops))
    size = (width * PANEL_INCHES[0], height * PANEL_INCHES[1])
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(height, width, squeeze=False).flatten()
    for axis, op in zip(axes, ops, strict=False):
        _panel(axis, [row for row in rows if row["op"] == op], op)
    for axis in axes[len(ops) :]:
        axis.set_visible(False)
    figure.suptitle(f"pallas_kernels on {device}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panel(axis: Any, rows: list[dict[str, Any]], op: str) -> None:
    modes = dict.fromkeys(row["mode"] for row in rows)
    for color, mode in enumerate(modes):
        mine = sorted((r for r in rows if r["mode"] == mode), key=lambda r: r["length"])
        for key, style in (("median_ms", "o-"), ("floor_ms", "--")):
            points = [(r["length"], r[key]) for r in mine if r.get(key)]
            label = mode if key == "median_ms" else f"{mode}, floor"
            if points:
                axis.plot(
                    *zip(*points, strict=True), style, color=f"C{color}", label=label
                )
    axis.set(title=op, xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
    axis.legend(fontsize="small")
