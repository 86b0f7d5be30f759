"""Writes a study's table, picture and figures, and says in words what holds."""

import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from glm5_jax import files, intervals
from glm5_jax.ablations import plot, results, runner
from glm5_jax.ablations import study as study_lib

NOT_SEPARATED = "not separated"


def write(plan: runner.Plan, name: str, typed: str) -> pathlib.Path:
    """Writes NAME.md, NAME.png and NAME.json into the study's folder.

    Args:
      plan: the study and its runs, of which those that are done count.
      name: of the files.
      typed: the command, for the page.

    Returns:
      The path of the page.
    """
    found = collect(plan)
    page = plan.workdir / f"{name}.md"
    files.write_text(page.with_suffix(".json"), _json(plan.study, found))
    plot.draw(plan.study, found, page.with_suffix(".png"))
    swept = [*_sweep(plan)] if plan.study.rates else []
    files.write_text(page, text(plan.study, found, name, typed, swept))
    return page


def collect(plan: runner.Plan) -> list[results.Result]:
    """Returns the results of the arms that are shown."""
    found = []
    for arm in plan.study.shown:
        jobs = [job for seed in plan.seeds if (job := plan.chosen(arm, seed))]
        done = [job for job in jobs if job.is_done]
        if not done:
            continue
        config = done[0].config
        data, has_rows = config.data, config.stage_record.has_batch_size
        found.append(
            results.Result(
                arm=arm,
                seeds=tuple(job.seed for job in done),
                records=tuple(results.records(job.folder) for job in done),
                tokens_per_step=data.batch_size * data.sequence_length * has_rows,
                rate=config.optim.learning_rate,
            )
        )
    return found


def text(
    study: study_lib.Study,
    found: Sequence[results.Result],
    name: str,
    typed: str,
    swept: Sequence[str] = (),
) -> str:
    """Returns the page: question, table, picture, what holds, rates that were tried."""
    title = name[:1].upper() + name[1:].replace("_", " ")
    seeds = max((len(result.seeds) for result in found), default=0)
    return "\n".join(
        [
            f"# {title}",
            "",
            study.question,
            "",
            "```text",
            typed,
            "```",
            "",
            *_table(study, found),
            "",
            f"Means of {seeds} seeds with 95% t intervals; a difference is that to "
            f"{study.reference.name!r} over the same seeds, and {NOT_SEPARATED!r} if "
            f"its interval includes 0. {_time(found)}",
            "",
            f"![{study.metric().label} of each arm]({name}.png)",
            "",
            paragraph(study, found),
            "",
            *swept,
        ]
    )


def paragraph(study: study_lib.Study, found: Sequence[results.Result]) -> str:
    """Returns what holds and what does not, from the figures alone."""
    sentences = _best(study, found)
    for claim, verdict, gain in results.verdicts(study, found):
        metric = study.metric(claim.label)
        figure = f": {_signed(gain, metric)} {metric.unit}" if gain else ""
        sentences.append(
            f"{claim.better!r} better than {claim.worse!r} in {metric.label} "
            f"({claim.source}): {verdict}{figure}."
        )
    sentences += [
        f"{result.arm.name!r} took the {edge} rate that was tried; try more."
        for result in found
        for edge, pick in (("lowest", min), ("highest", max))
        if not result.arm.after and pick(study.rates, default=None) == result.rate
    ]
    if study.paper_says:
        sentences.append(f"The paper: {study.paper_says}")
    return " ".join(sentences)


def _sweep(plan: runner.Plan) -> Iterator[str]:
    """Yields the lines of a table with what each arm's first seed had at each rate."""
    study = plan.study
    names = [f"{m.label}, {m.unit}" if m.unit else m.label for m in study.metrics]
    yield f"Rates that seed {plan.seeds[0]} tried:"
    yield ""
    yield _line(["arm", "rate", *names])
    yield _line(["---"] * (2 + len(names)))
    for job in plan.jobs():
        arm = study.arm(job.arm)
        if job.is_done and job.seed == plan.seeds[0] and arm.is_shown and not arm.after:
            values = [
                (results.value(results.records(job.folder), metric), metric.digits)
                for metric in study.metrics
            ]
            cells = ["" if v is None else f"{v:.{digits}f}" for v, digits in values]
            yield _line([arm.name, f"{job.config.optim.learning_rate:.3g}", *cells])
    yield ""


def _time(found: Sequence[results.Result]) -> str:
    """Returns how long the runs took, each since its last start."""
    trained = [r for r in found if r.arm.is_trained]
    seconds = [lines[-1].get("seconds", 0) for r in trained for lines in r.records]
    return f"These {len(seconds)} runs took {sum(seconds) / 60:.0f} minutes together."


def _best(study: study_lib.Study, found: Sequence[results.Result]) -> list[str]:
    """Returns which arm has the best mean, and which it is separated from."""
    metric = study.metric()
    means = {
        r.arm.name: intervals.mean_interval(list(values.values())).mean
        for r in found
        if (values := r.values(metric))
    }
    if not metric.better or len(means) < 2:
        return []
    pick = max if metric.better == "higher" else min
    best = pick(means, key=lambda name: means[name])
    by_name = {r.arm.name: r for r in found}
    close, apart = [], []
    for name in means:
        gap = results.difference(by_name[best], by_name[name], metric)
        if name != best and gap:
            (apart if results.is_separated(gap) else close).append(name)
    words = f"Best in {metric.label}: {best!r}, {means[best]:.{metric.digits}f}"
    words += f" {metric.unit}"
    if apart:
        words += f"; separated from {', '.join(map(repr, apart))}"
    if close:
        words += f"; {NOT_SEPARATED} from {', '.join(map(repr, close))}"
    return [f"{words}."]


def _table(study: study_lib.Study, found: Sequence[results.Result]) -> list[str]:
    """Returns the lines of the table: an arm a row."""
    by_name = {result.arm.name: result for result in found}
    reference = by_name.get(study.reference.name)
    labels = list(dict.fromkeys(k for row in study.paper.values() for k in row))
    head = ["arm", "seeds"] + ["rate"] * bool(study.rates)
    for metric in study.metrics:
        unit = f", {metric.unit}" if metric.unit else ""
        head += [f"{metric.label}{unit}", f"{metric.label}: difference"]
    head += [f"paper: {label}" for label in labels]
    rows = []
    for arm in study.shown:
        result = by_name.get(arm.name)
        row = [arm.name, str(len(result.seeds)) if result else "0"]
        row += [f"{result.rate:.3g}" if result else ""] * bool(study.rates)
        for metric in study.metrics:
            row += _cells(result, reference, metric)
        rows.append(row + [study.paper.get(arm.name, {}).get(k, "") for k in labels])
    return [_line(row) for row in (head, ["---"] * len(head), *rows)]


def _cells(
    result: results.Result | None,
    reference: results.Result | None,
    metric: study_lib.Metric,
) -> list[str]:
    """Returns a metric's value and its difference to the baseline."""
    values = list(result.values(metric).values()) if result else []
    if result is None or not values:
        return ["", ""]
    cell = _spelled(intervals.mean_interval(values), metric)
    if reference is None or reference.arm.name == result.arm.name:
        return [cell, "baseline" if reference else ""]
    gap = results.difference(result, reference, metric)
    if gap is None:
        return [cell, ""]
    mark = "" if results.is_separated(gap) else f", {NOT_SEPARATED}"
    return [cell, _signed(gap, metric) + mark]


def _spelled(x: intervals.Interval, metric: study_lib.Metric) -> str:
    d = metric.digits
    if math.isnan(x.low):
        return f"{x.mean:.{d}f}"
    return f"{x.mean:.{d}f} ({x.low:.{d}f} to {x.high:.{d}f})"


def _signed(x: intervals.Interval, metric: study_lib.Metric) -> str:
    d = metric.digits
    if math.isnan(x.low):
        return f"{x.mean:+.{d}f}"
    return f"{x.mean:+.{d}f} ({x.low:+.{d}f} to {x.high:+.{d}f})"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _json(study: study_lib.Study, found: Sequence[results.Result]) -> str:
    """Returns every value, interval, difference and verdict as JSON."""
    by_name = {result.arm.name: result for result in found}
    reference = by_name.get(study.reference.name)
    arms: dict[str, Any] = {}
    for result in found:
        arms[result.arm.name] = {"seeds": result.seeds, "rate": result.rate}
        for metric in study.metrics:
            values = result.values(metric)
            if not values:
                continue
            gap = results.difference(result, reference, metric) if reference else None
            arms[result.arm.name][metric.label] = {
                "unit": metric.unit,
                "values": values,
                "interval": intervals.mean_interval(list(values.values()))._asdict(),
                "difference": gap._asdict() if gap else None,
            }
    claims = [
        {
            "better": claim.better,
            "worse": claim.worse,
            "source": claim.source,
            "metric": study.metric(claim.label).label,
            "verdict": verdict,
            "advantage": gain._asdict() if gain else None,
        }
        for claim, verdict, gain in results.verdicts(study, found)
    ]
    tree = {"question": study.question, "arms": arms, "claims": claims}
    return json.dumps(_finite(tree), indent=2) + "\n"


def _finite(tree: Any) -> Any:
    """Returns a tree with None for numbers that JSON does not have."""
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
