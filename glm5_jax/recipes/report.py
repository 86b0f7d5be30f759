"""The report of a pipeline: report.html, one file with everything, and report.md.

All of it comes from the folder: the metrics, summaries, samples and curves of the runs,
and what was measured after each stage.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.recipes import measured, page, record
from glm5_jax.training import loss
from glm5_jax.training.reporting import metrics as metrics_lib

HTML, MARKDOWN = "report.html", "report.md"
_SHARE = 0.1  # of the steps, over which first and last values are means
_TIMES = ("compile", "restore", "step", "evaluate", "sample", "save")
_REWARD = "rollout/reward"
_NONE = "-"

Figures = dict[str, float]  # by name; of one stage


def figures_of(config: config_lib.TrainConfig, folder: pathlib.Path) -> Figures:
    """Returns the figures of a finished stage: of its run, and those measured after."""
    lines = metrics_lib.read(folder / "metrics.jsonl")
    summary = _summary(folder)
    found = {k: float(v) for k, v in summary.items() if isinstance(v, int | float)}
    name, _ = learned_by(config)
    values = [line[name] for line in lines if line.get(name) is not None]
    num = max(1, round(_SHARE * len(values)))
    found["first"] = float(np.mean(values[:num]))
    found["last"] = float(np.mean(values[-num:]))
    own = [lines[-1].get(f"goodput/{kind}_seconds") or 0.0 for kind in _TIMES]
    after = measured.read(folder)
    found["wall_seconds"] = max(sum(own), found["seconds"]) + after["seconds"]
    return found | {name: values[0] for name, values in after["figures"].items()}


def learned_by(config: config_lib.TrainConfig) -> tuple[str, record.Relation]:
    """Returns the metric that shows whether a stage learns, and how it should move."""
    stage = config.stage_record
    if not stage.is_loss_telling:
        return _REWARD, "rises"
    return loss.METRIC_NAMES[stage.losses[0]], "falls"


def write(
    recipe: record.Recipe, workdir: pathlib.Path, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes both files of a finished pipeline.

    Args:
      recipe: that was run.
      workdir: its folder.
      origin: content of recipe.json.

    Returns:
      The paths, and how many claims hold.
    """
    configs = recipe.configs(workdir, origin["seed"])
    folders = recipe.folders(workdir)
    stages = {
        folder: (config, figures_of(config, folder))
        for config, folder in zip(configs, folders, strict=True)
    }
    names = dict(zip((s.name for s in recipe.stages), stages.values(), strict=True))
    claims = _claims(recipe, names)
    title = f"GLM-5 at small size: the pipeline {recipe.name}"
    blocks = [
        page.Paragraph(recipe.description),
        page.Paragraph(_origin(recipe, names, {**_summary(folders[-1]), **origin})),
        page.Heading("What it shows"),
        page.Table(("claim", "from", "to", "holds"), [row for row, _ in claims]),
        page.Heading("Stages"),
        _stage_table(names),
        *_figure_tables(names),
        page.Heading("Samples"),
        *_samples(folders),
        page.Heading("Curves"),
        *(_curve(folder) for folder in folders),
    ]
    files.write_text(workdir / HTML, page.to_html(title, blocks))
    files.write_text(workdir / MARKDOWN, page.to_markdown(title, blocks, workdir))
    holds = [h for _, h in claims]
    return {
        "report": str(workdir / HTML),
        "claims": len(holds),
        "claims_that_hold": sum(holds),
    }


def _summary(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


Stages = Mapping[str, tuple[config_lib.TrainConfig, Figures]]


def _origin(recipe: record.Recipe, stages: Stages, origin: Mapping[str, Any]) -> str:
    """Returns a paragraph on where the numbers come from."""
    seconds = sum(figures["wall_seconds"] for _, figures in stages.values())
    return (
        f"Made by `python -m glm5_jax.pipeline --recipe={recipe.name} "
        f"--seed={origin['seed']}` at commit {origin['commit']}, begun "
        f"{origin['began']}, in {seconds / 60:.1f} minutes of wall time on "
        f"{origin['device']} with jax {origin['jax']}. The model has "
        f"{origin['parameters']:,} parameters."
    )


def _claims(
    recipe: record.Recipe, stages: Stages
) -> list[tuple[tuple[str, str, str, str], bool]]:
    """Returns a row for each claim, and whether it holds.

    Every stage claims to learn, by its own loss or reward.
    """
    rows = []
    for name, (config, figures) in stages.items():
        metric, relation = learned_by(config)
        claim = record.Claim(
            text=f"`{metric}` {relation} in {name}",
            figure=metric,
            before=name,
            after=name,
            relation=relation,
        )
        rows.append(_row(claim, figures["first"], figures["last"]))
    for claim in recipe.claims:
        before, after = stages[claim.before][1], stages[claim.after][1]
        rows.append(_row(claim, before.get(claim.figure), after.get(claim.figure)))
    return rows


def _row(
    claim: record.Claim, first: float | None, second: float | None
) -> tuple[tuple[str, str, str, str], bool]:
    if first is None or second is None:
        return (claim.text, _short(first), _short(second), "not measured"), False
    holds = claim.holds(first, second)
    verdict = "yes" if holds else "no"
    return (claim.text, _short(first), _short(second), verdict), holds


def _stage_table(stages: Stages) -> page.Table:
    head = (
        *("stage", "steps", "length", "attention", "loss, first", "loss, last"),
        *("bits/byte", "success", "tok/s", "minutes"),
    )
    rows = [
        (
            name,
            f"{figures['steps']:.0f}",
            str(config.data.sequence_length),
            config.model.attention,
            _short(figures["first"]),
            _short(figures["last"]),
            _short(figures.get("eval/bits_per_byte")),
            _short(figures.get("eval/success")),
            f"{figures.get('perf/tokens_per_second', 0):,.0f}",
            f"{figures['wall_seconds'] / 60:.1f}",
        )
        for name, (config, figures) in stages.items()
    ]
    return page.Table(head, rows)


def _figure_tables(stages: Stages) -> list[page.Block]:
    """Returns a table for each kind of measured figure: stages by columns."""
    blocks: list[page.Block] = []
    kinds: dict[str, list[str]] = {}
    for _, figures in stages.values():
        for name in figures:
            kind, _, column = name.partition("/")
            if column and kind not in ("eval", "perf", "goodput"):
                columns = kinds.setdefault(kind, [])
                columns += [column] * (column not in columns)
    for kind, columns in kinds.items():
        rows = [
            (stage, *(_short(figures.get(f"{kind}/{column}")) for column in columns))
            for stage, (_, figures) in stages.items()
            if any(f"{kind}/{column}" in figures for column in columns)
        ]
        blocks += [page.Heading(kind), page.Table(("after stage", *columns), rows)]
    return blocks


def _samples(folders: Sequence[pathlib.Path]) -> list[page.Block]:
    """Returns the last sample of each stage."""
    blocks: list[page.Block] = []
    for folder in folders:
        found = sorted((folder / "samples").glob("*.txt"), key=lambda p: int(p.stem))
        if found:
            text = found[-1].read_text(encoding="utf-8")
            blocks += [page.Paragraph(folder.name), page.Quotation(text)]
    return blocks


def _curve(folder: pathlib.Path) -> page.Picture:
    return page.Picture(folder / "loss.png", f"Curves of {folder.name}")


def _short(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3g}"
