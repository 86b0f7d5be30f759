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
from glm5_jax.recipes import measured, page, plot, record
from glm5_jax.training import loss
from glm5_jax.training.reporting import metrics as metrics_lib

HTML, MARKDOWN, PICTURE = "report.html", "report.md", "report.png"
_SHARE = 0.1  # of the steps, over which first and last values are means
_TIMES = ("compile", "restore", "step", "evaluate", "sample", "save")
_LOSS, _REWARD = "train/loss", "rollout/reward"
_NONE = "-"
_OF_THE_RUN = ("eval", "perf", "goodput")  # kinds that the run itself measures

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
    if config.stage_record.is_loss_telling:
        return _LOSS, "falls"
    return _REWARD, "rises"


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
    kinds = _kinds(names)
    plot.draw(_losses(names, folders), kinds, workdir / PICTURE)
    title = f"GLM-5 at small size: the pipeline {recipe.name}"
    blocks = [
        page.Paragraph(recipe.description),
        page.Paragraph(_origin(recipe, names, {**_summary(folders[-1]), **origin})),
        page.Heading("What it shows"),
        page.Table(("claim", "from", "to", "holds"), [row for row, _ in claims]),
        page.Picture(workdir / PICTURE, "Loss and measured figures, stage by stage"),
        page.Heading("Stages"),
        _stage_table(names),
        *_figure_tables(kinds),
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
        *("stage", "steps", "length", "keys read", "loss or reward, first", "last"),
        *("bits/byte", "success", "tok/s", "minutes"),
    )
    rows = [
        (
            name,
            f"{figures['steps']:.0f}",
            str(config.data.sequence_length),
            _keys(config),
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


def _keys(config: config_lib.TrainConfig) -> str:
    """Returns how many keys a query reads at most."""
    length, topk = config.data.sequence_length, config.model.index_topk
    is_sparse = config.model.attention == "sparse" and topk < length
    return f"{topk} of {length}" if is_sparse else "all"


def _kinds(stages: Stages) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the measured figures: by kind, line and stage."""
    kinds: dict[str, dict[str, dict[str, float]]] = {}
    for stage, (_, figures) in stages.items():
        for name, value in figures.items():
            kind, _, line = name.partition("/")
            if line and kind not in _OF_THE_RUN:
                kinds.setdefault(kind, {}).setdefault(line, {})[stage] = value
    return kinds


def _figure_tables(
    kinds: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> list[page.Block]:
    """Returns a table for each kind of measured figure: a stage a row."""
    blocks: list[page.Block] = []
    for kind, lines in kinds.items():
        stages = dict.fromkeys(stage for values in lines.values() for stage in values)
        rows = [
            (stage, *(_short(values.get(stage)) for values in lines.values()))
            for stage in stages
        ]
        head = ("after stage", *lines)
        blocks += [page.Heading(f"Suite {kind}"), page.Table(head, rows)]
    return blocks


def _losses(stages: Stages, folders: Sequence[pathlib.Path]) -> dict[str, plot.Curve]:
    """Returns the loss of the next token over millions of tokens, a curve a stage."""
    curves, name = {}, loss.METRIC_NAMES["next_token"]
    for (stage, (config, _)), folder in zip(stages.items(), folders, strict=True):
        lines = metrics_lib.read(folder / "metrics.jsonl")
        found = [(r["step"], r[name]) for r in lines if r.get(name) is not None]
        if found:
            steps, values = np.array(found, float).T
            per_step = config.num_rows * config.data.sequence_length
            curves[stage] = steps * per_step / 1e6, values
    return curves


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
