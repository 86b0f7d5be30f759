"""Writes a comparison of runs as text, or as JSON."""

import json
import math
from collections.abc import Sequence

from glm5_jax.training.reporting.comparison import figures as figures_lib
from glm5_jax.training.reporting.comparison import runs as runs_lib

_DIGITS = 5  # of the largest number in a row
_MAX_DECIMALS = 4
_SMALL = 1e-3  # below it decimals would hide the number


def text(runs: Sequence[runs_lib.Run], metrics: Sequence[str]) -> str:
    """Returns two tables: settings that differ, and figures with their differences."""
    names = [run.name for run in runs]
    differing = figures_lib.settings(runs)
    rows = [[name, *(_setting(run, name) for run in runs)] for name in differing]
    parts = [_table([["setting", *names], *rows]) if rows else "The configs are equal."]
    step = figures_lib.common_step(runs)
    parts += [
        "No step is common to all: the figures are at each run's last."
        if step is None
        else f"Figures at step {step}, the last that all have; differences are to "
        f"{names[0]}."
    ]
    head = ["metric", "step", names[0]]
    for name in names[1:]:
        head += [name, "difference"]
    found = figures_lib.of(runs, metrics)
    parts += [_table([head, *map(_row, found)])]
    apart = [figure.metric for figure in found if not figure.is_aligned]
    if apart and step is not None:
        parts += [f"Measured at no common step, so not compared: {', '.join(apart)}."]
    return "\n\n".join(parts)


def as_json(runs: Sequence[runs_lib.Run], metrics: Sequence[str]) -> str:
    """Returns the same as one line of JSON, with a list in the order of the runs."""
    found = [
        {
            "metric": figure.metric,
            "kind": figure.kind,
            "values": figure.values,
            "steps": figure.steps,
            "differences": figure.differences,
        }
        for figure in figures_lib.of(runs, metrics)
    ]
    tree = {
        "runs": [{"name": run.name, "path": str(run.path)} for run in runs],
        "settings": {
            name: [run.settings.get(name) for run in runs]
            for name in figures_lib.settings(runs)
        },
        "common_step": figures_lib.common_step(runs),
        "figures": found,
    }
    return json.dumps(tree)


def _setting(run: runs_lib.Run, name: str) -> str:
    value = run.settings.get(name, "-")
    return value if isinstance(value, str) and value else json.dumps(value)


def _row(figure: figures_lib.Figure) -> list[str]:
    """Returns the cells of a figure; a value at a step of its own is followed by it."""
    is_best = figure.kind == "best"
    label = {"final": "", "best": "  best", "median": ", median"}[figure.kind]
    steps = {step for step in figure.steps if step is not None}
    is_total = figure.metric == "steps"
    row = [label if is_best else f"{figure.metric}{label}"]
    row += [str(*steps) if len(steps) == 1 and not is_total else ""]
    decimals = _decimals([x for x in figure.values if x is not None])
    columns = zip(figure.values, figure.steps, figure.differences, strict=True)
    for i, (value, step, difference) in enumerate(columns):
        at = f" @{step}" if len(steps) > 1 and not is_total and step else ""
        row += [_number(value, decimals) + at] + [
            _number(difference, decimals, "+")
        ] * (i > 0)
    return row


def _decimals(values: Sequence[runs_lib.Number]) -> int | None:
    """Returns how many decimals the numbers of a row have; None for too small ones."""
    largest = max(map(abs, values))
    if all(isinstance(value, int) for value in values):
        return 0
    if largest < _SMALL:
        return None
    return min(max(_DIGITS - 1 - math.floor(math.log10(largest)), 0), _MAX_DECIMALS)


def _number(value: runs_lib.Number | None, decimals: int | None, sign: str = "") -> str:
    if value is None:
        return "" if sign else "-"
    if sign and value == 0:
        return "0"  # to the last digit, which +0.0000 need not be
    if decimals is None:
        return f"{value:{sign}.4g}"
    return f"{value:{sign}z,.{decimals}f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns: names to the left, the rest to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [x.rjust(n) for x, n in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
