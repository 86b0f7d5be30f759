"""loss.png: the curves of a run on one page."""

import os
from collections.abc import Sequence

import matplotlib.figure
from matplotlib import layout_engine

from glm5_jax.training.reporting import curves, records

_BLUE, _ORANGE, _GREEN, _GREY = curves.BLUE, curves.ORANGE, curves.GREEN, curves.GREY
_GRAD_NORM = curves.Panel(
    title="Gradient norm",
    unit="L2 norm",
    series=(curves.Series("train/grad_norm", "gradient", _BLUE),),
    is_log=True,
)
_LEARNING_RATE = curves.Panel(
    title="Learning rate",
    unit="per update",
    series=(curves.Series("optim/learning_rate", "rate", _GREY, is_exact=True),),
)
_TEXT_ROWS = (
    (
        curves.Panel(
            title="Training loss",
            unit="nats per token",
            series=(
                curves.Series("train/loss", "total", _GREY),
                curves.Series("train/mtp_loss", "multi-token prediction", _ORANGE),
                curves.Series("train/lm_loss", "next token", _BLUE),
            ),
        ),
        curves.Panel(
            title="Held-out text",
            unit="bits per byte",
            series=(
                curves.Series("eval/bits_per_byte", "held-out", _GREEN, is_sparse=True),
            ),
        ),
    ),
    (
        curves.Panel(
            title="Indexer: KL to the attention",
            unit="nats per query, all layers",
            series=(curves.Series("train/indexer_kl", "indexer", _ORANGE),),
            is_log=True,
        ),
        _GRAD_NORM,
        _LEARNING_RATE,
    ),
)
_INTERVAL = ("eval/success_low", "eval/success_high")
_RL_ROWS = (  # without the loss: its value is 0 as long as all ratios are 1
    (
        curves.Panel(
            title="Reward, and success on held-out tasks",
            unit="mean reward, share solved",
            series=(
                curves.Series("rollout/reward", "reward of rollouts", _BLUE),
                curves.Series(
                    "eval/success", "held-out, 95%", _GREEN, _INTERVAL, is_sparse=True
                ),
            ),
            reach=1.0,
        ),
        curves.Panel(
            title="Log-probs: trainer against engine",
            unit="|difference|, nats per sampled token",
            series=(
                curves.Series("rl/logprob_gap", "mean", _BLUE),
                curves.Series("rl/logprob_gap_max", "largest", _ORANGE),
            ),
            is_log=True,
        ),
    ),
    (
        curves.Panel(
            title="Tokens without a gradient",
            unit="share of sampled tokens",
            series=(
                curves.Series("rl/clip_fraction", "clipped", _BLUE),
                curves.Series("rl/masked_fraction", "masked", _ORANGE),
            ),
            reach=0.01,
        ),
        curves.Panel(
            title="Entropy",
            unit="nats per sampled token",
            series=(curves.Series("rl/entropy", "policy", _BLUE),),
        ),
        curves.Panel(
            title="Length of a response",
            unit="tokens per turn",
            series=(curves.Series("rollout/response_length", "mean", _BLUE),),
        ),
    ),
    (
        _GRAD_NORM,
        _LEARNING_RATE,
        curves.Panel(
            title="Time",
            unit="seconds",
            series=(
                curves.Series("perf/step_seconds", "step", _GREY),
                curves.Series("perf/rollout_seconds", "of it rollouts", _BLUE),
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
    lines = records.read(metrics_path)
    is_rl = any("rollout/reward" in line for line in lines)
    panels = _RL_ROWS if is_rl else _TEXT_ROWS
    rows = [[p for p in row if _is_in(lines, p)] for row in panels]
    rows = [row for row in rows if row] or [[panels[0][0]]]
    heights = [4.2, 2.6, 2.6][: len(rows)]
    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)  # inches
    figure = matplotlib.figure.Figure(figsize=(11, sum(heights)), layout=layout)
    grid = figure.add_gridspec(len(rows), _NUM_COLUMNS, height_ratios=heights)
    for i, row in enumerate(rows):
        width = _NUM_COLUMNS // len(row)
        for j, panel in enumerate(row):
            axes = figure.add_subplot(grid[i, j * width : (j + 1) * width])
            curves.draw(axes, panel, [lines] * len(panel.series))
    figure.savefig(out_png, dpi=120)


def _is_in(lines: Sequence[curves.Record], panel: curves.Panel) -> bool:
    return any(len(curves.curve(lines, s.metric)[0]) for s in panel.series)
