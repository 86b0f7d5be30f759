"""Curves and a table of runs that learned from rollouts: one colour a recipe.

    python benchmarks/rl_curves.py --out=docs/rl_reverse.png \
        IcePop=runs/a0,runs/a1,runs/a2 GRPO=runs/b0,runs/b1,runs/b2

The runs of a name differ in their seed. Lines are means over them, bands reach from the
least to the largest; a run that ended early keeps its last value. Prints a Markdown
table.
"""

import argparse
import itertools
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.figure
import numpy as np

from glm5_jax.training.reporting import metrics

SOLVED = 0.95  # the share of held-out tasks whose first step is in the table
# Apart in grey too: by lightness, dashes and markers.
STYLES = (
    {"color": "#1e3a8a", "linestyle": "-", "marker": "o"},
    {"color": "#ea580c", "linestyle": (0, (5, 2)), "marker": "s"},
    {"color": "#10b981", "linestyle": (0, (1, 1.2)), "marker": "^"},
    {"color": "#6b7280", "linestyle": (0, (5, 1.5, 1, 1.5)), "marker": "D"},
    {"color": "#db2777", "linestyle": (0, (8, 2)), "marker": "v"},
)
SMOOTHING = 5  # steps whose rewards are averaged
GREY, PALE = "#6b7280", "#e5e7eb"
COLUMNS = {
    "recipe": str,
    "seeds": str,
    "held-out success": "{:.1%}".format,
    "range": str,
    f"first step > {SOLVED:.0%}": str,
    "masked": "{:.2%}".format,
    "gap, mean": "{:.1e}".format,
    "gradient norm, max": "{:.2g}".format,
    "seconds": "{:.0f}".format,
}

Run = list[dict]  # the records of a metrics.jsonl


def main() -> None:
    """Parses flags, draws the picture and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="+", metavar="NAME=RUN,RUN", type=_recipe)
    parser.add_argument("--out", type=pathlib.Path, help="the picture to write")
    args = parser.parse_args()
    recipes = {name: [read(run) for run in runs] for name, runs in args.recipes}
    if len(recipes) > len(STYLES):
        parser.error(f"at most {len(STYLES)} names can be told apart")
    if args.out:
        draw(recipes).savefig(args.out, dpi=130)
    rows = [row(name, runs) for name, runs in recipes.items()]
    print(table(rows))


def draw(recipes: dict[str, list[Run]]) -> matplotlib.figure.Figure:
    """Reward and held-out success, against steps and against seconds."""
    figure = matplotlib.figure.Figure(figsize=(11, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for (name, runs), style in zip(recipes.items(), STYLES, strict=False):
        style = style | {"label": f"{name} ({len(runs)} seed{'s' * (len(runs) > 1)})"}
        rewards, success = (
            _joined(runs, "rollout/reward"),
            _joined(runs, "eval/success"),
        )
        rewards = *rewards[:2], smooth(rewards[2])
        for column in (0, 1):
            _draw_band(axes[0, column], rewards[column], rewards[2], style, None)
            marker = style["marker"]
            _draw_band(axes[1, column], success[column], success[2], style, marker)
    titles = "Reward of rollouts", "Success on held-out tasks"
    for row_axes, title in zip(axes, titles, strict=True):
        row_axes[0].set_title(title, loc="left", fontsize=11, fontweight="bold")
        for one in row_axes:
            clean(one)
    for one in axes[1]:
        one.axhline(SOLVED, color=GREY, linewidth=0.8, linestyle=":")
    axes[1, 0].set_xlabel("step", color=GREY)
    axes[1, 1].set_xlabel("seconds of rollouts and updates", color=GREY)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, frameon=False, loc="outside lower center", ncols=len(labels)
    )
    return figure


def row(name: str, runs: Sequence[Run]) -> dict[str, object]:
    """Returns a recipe's row of the table; means are over steps, then over seeds."""
    final = [_curve(run, "eval/success")[1][-1] for run in runs]
    firsts = [first_solved(run) for run in runs]
    values = (
        name,
        str(len(runs)),
        np.mean(final),
        f"{min(final):.1%} to {max(final):.1%}",
        ", ".join("-" if first is None else f"{first:.0f}" for first in firsts),
        np.mean([_curve(run, "rl/masked_fraction")[1].mean() for run in runs]),
        np.mean([_curve(run, "rl/logprob_gap")[1].mean() for run in runs]),
        max(_curve(run, "train/grad_norm")[1].max() for run in runs),
        np.mean([_curve(run, "perf/step_seconds")[1].sum() for run in runs]),
    )
    return dict(zip(COLUMNS, values, strict=True))


def table(rows: Sequence[dict[str, object]]) -> str:
    """Rows as Markdown."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    lines += [[form(cells[key]) for key, form in COLUMNS.items()] for cells in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read(folder: str) -> Run:
    """Returns the records of a run, with the seconds of all steps up to each.

    What it solved before its first step comes first, if that was measured.
    """
    records = metrics.read(pathlib.Path(folder) / "metrics.jsonl")
    if not any(r.get("eval/success") is not None for r in records):
        raise SystemExit(f"{folder} has no eval/success: not a run of stage 'rl'")
    spent = itertools.accumulate(r["perf/step_seconds"] for r in records)
    run = [r | {"seconds": now} for r, now in zip(records, spent, strict=True)]
    start = run[0].get("rollout/start_success")
    before = {"step": 0, "seconds": 0.0, "eval/success": start}
    return run if start is None else [before, *run]


def first_solved(run: Run) -> float | None:
    """Returns the first step that was evaluated above SOLVED, or None."""
    steps, success = _curve(run, "eval/success")
    above = steps[success > SOLVED]
    return above[0] if len(above) else None


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns a centred mean of each row, over fewer values at the ends."""
    window = np.ones(min(SMOOTHING, values.shape[-1]))
    count = np.convolve(np.ones(values.shape[-1]), window, mode="same")
    return np.stack([np.convolve(v, window, mode="same") / count for v in values])


def clean(axes: matplotlib.axes.Axes) -> None:
    """Draws a pale grid, and neither a frame nor ticks."""
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=GREY, length=0)
    axes.yaxis.set_major_formatter("{x:g}")


def _recipe(text: str) -> tuple[str, list[str]]:
    name, equals, runs = text.partition("=")
    if not (name and equals and runs):
        raise argparse.ArgumentTypeError(f"must be NAME=RUN,RUN, got {text!r}")
    return name, runs.split(",")


def _curve(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(r["step"], r[name]) for r in run if r.get(name) is not None]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return steps, values


def _joined(runs: Sequence[Run], name: str) -> tuple[np.ndarray, ...]:
    """Returns steps, mean seconds up to them, and values [runs, steps].

    The steps are those of the longest run; a run that ended earlier keeps its last
    value and its seconds.
    """
    found = [[r for r in run if r.get(name) is not None] for run in runs]
    if not all(found):
        raise SystemExit(f"a run has no {name}")
    places = [_curve(run, name)[0] for run in runs]
    steps = max(places, key=lambda one: one[-1])

    def held(key: str) -> np.ndarray:
        values = [_curve(run, key)[1] for run in found]
        return np.stack(
            [np.interp(steps, *pair) for pair in zip(places, values, strict=True)]
        )

    return steps, held("seconds").mean(axis=0), held(name)


def _draw_band(
    axes: matplotlib.axes.Axes,
    places: np.ndarray,
    values: np.ndarray,
    style: dict,
    marker: str | None,
) -> None:
    """Mean and range over rows of values."""
    more = {"marker": marker, "markersize": 5, "linewidth": 1.8}
    axes.plot(places, values.mean(axis=0), **style | more)
    limits = values.min(axis=0), values.max(axis=0)
    axes.fill_between(places, *limits, color=style["color"], alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()
