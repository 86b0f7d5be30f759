"""Reads what the runs of a study have left, and compares its arms."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm5_jax import intervals
from glm5_jax.ablations import study as study_lib

MEASURED = "measured.jsonl"  # figures of the checkpoints, a line each
Records = list[dict[str, Any]]


class Result(NamedTuple):
    """An arm's figures over its seeds."""

    arm: study_lib.Arm
    seeds: tuple[int, ...]
    records: tuple[Records, ...]  # of each seed, by step
    tokens_per_step: int  # 0: steps are no measure of tokens
    rate: float  # learning rate that was taken

    def values(self, metric: study_lib.Metric) -> dict[int, float]:
        """Returns the value of each seed that has one."""
        pairs = zip(self.seeds, self.records, strict=True)
        found = {seed: value(records, metric) for seed, records in pairs}
        return {seed: v for seed, v in found.items() if v is not None}


def records(folder: pathlib.Path) -> Records:
    """Returns the lines of a run by step: metrics, measured figures and the summary."""
    by_step: dict[int, dict[str, Any]] = {}
    for name in ("metrics.jsonl", MEASURED):
        path = folder / name
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            by_step.setdefault(record["step"], {}).update(record)
    lines = [by_step[step] for step in sorted(by_step)]
    path = folder / "summary.json"
    if lines and path.exists():
        lines[-1] = json.loads(path.read_text()) | lines[-1]
    return lines


def value(lines: Records, metric: study_lib.Metric) -> float | None:
    """Returns a metric's value of one run, or None."""
    _, values = curve(lines, metric.key)
    if not values.size:
        return None
    if metric.value == "max":
        return float(values.max())
    if metric.value == "late":
        return float(values[-max(values.size // 4, 1) :].mean())
    return float(values[-1])


def curve(lines: Records, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps and values of the lines that have a number for the key."""
    points = [(line["step"], line[key]) for line in lines if _is_number(line.get(key))]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return steps, values


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and bool(np.isfinite(x))


def difference(
    one: Result, other: Result, metric: study_lib.Metric
) -> intervals.Interval | None:
    """Returns one - other over the seeds that both have; None without such seeds."""
    mine, theirs = one.values(metric), other.values(metric)
    if not mine.keys() & theirs.keys():
        return None
    return intervals.paired_difference(mine, theirs)


def is_separated(interval: intervals.Interval) -> bool:
    """Tells whether an interval excludes 0; that of one seed, or of equal runs, not."""
    return bool(interval.low > 0 or interval.high < 0)


class Verdict(NamedTuple):
    """A claim beside our figures."""

    claim: study_lib.Claim
    word: str  # "holds", "reversed", "not separated" or "not measured"
    # Advantage of the arm that the claim says is better.
    advantage: intervals.Interval | None


def verdicts(study: study_lib.Study, found: Sequence[Result]) -> list[Verdict]:
    """Returns for each claim whether our figures show the same order."""
    by_name: Mapping[str, Result] = {r.arm.name: r for r in found}
    return [_verdict(study, claim, by_name) for claim in study.claims]


def _verdict(
    study: study_lib.Study, claim: study_lib.Claim, by_name: Mapping[str, Result]
) -> Verdict:
    metric = study.metric(claim.label)
    one, other = by_name.get(claim.better), by_name.get(claim.worse)
    gap = difference(one, other, metric) if one and other else None
    if gap is None:
        return Verdict(claim, "not measured", None)
    if metric.better != "higher":
        gap = intervals.Interval(-gap.mean, -gap.high, -gap.low, gap.count)
    if not is_separated(gap):
        return Verdict(claim, "not separated", gap)
    return Verdict(claim, "holds" if gap.low > 0 else "reversed", gap)
