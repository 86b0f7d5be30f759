"""Figures of suites with their intervals: as JSON lines and as a Markdown table."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import logging

from glm5_jax import files, intervals
from glm5_jax.evals import record


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of a suite at a length."""

    suite: str
    length: int | None  # None: the suite has no length
    seed: int
    figures: dict[str, intervals.Interval]  # by name; of 95%

    def to_json(self) -> dict[str, Any]:
        """Returns the values of its JSON line; an end that is not known is null."""
        figures = {
            name: {k: _known(v) for k, v in interval._asdict().items()}
            for name, interval in self.figures.items()
        }
        return {**dataclasses.asdict(self), "figures": figures}


def summarize(
    suite: record.Suite, setting: record.Setting, answers: Sequence[record.Answer]
) -> Result:
    """Returns the figures of all answers."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for answer in answers:
        for name, pair in answer.figures.items():
            pairs.setdefault(name, []).append(pair)
    figures = {}
    for name, given in pairs.items():
        sums, weights = zip(*given, strict=True)
        if not any(weights):
            logging.warning("%s has nothing to measure for %s.", suite.name, name)
            continue
        if suite.is_share and math.isfinite(sum(sums)):
            figures[name] = intervals.proportion_interval(int(sum(sums)), len(sums))
        else:
            figures[name] = intervals.ratio_interval(sums, weights)
    length = setting.length if suite.has_length else None
    return Result(suite.name, length, setting.seed, figures)


def table(results: Sequence[Result]) -> str:
    """Returns a Markdown table, a figure a row."""
    lines = [
        "| suite | length | figure | value | 95% interval | n |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for name, (mean, low, high, count) in result.figures.items():
            ends = "" if math.isnan(low) else f"{low:.4g} to {high:.4g}"
            cells = [
                result.suite,
                result.length or "",
                name,
                f"{mean:.4g}",
                ends,
                count,
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def write(folder: pathlib.Path, digest: str, results: Sequence[Result]) -> None:
    """Adds results to results.jsonl and renews table.md, of one checkpoint's results.

    A result replaces an earlier one of the same checkpoint, suite, length and seed.
    """
    path = folder / "results.jsonl"
    entries: dict[tuple, dict[str, Any]] = {}
    old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    new = [{"checkpoint": digest[:16], **result.to_json()} for result in results]
    for entry in [*map(json.loads, old), *new]:
        names = ("checkpoint", "suite", "length", "seed")
        entries[tuple(entry[name] for name in names)] = entry
    lines = [json.dumps(entry) + "\n" for entry in entries.values()]
    files.write_text(path, "".join(lines))
    own = [x for x in entries.values() if x["checkpoint"] == digest[:16]]
    files.write_text(folder / "table.md", table([*map(_result, own)]))


def _result(entry: dict[str, Any]) -> Result:
    known = lambda value: math.nan if value is None else value
    figures = {
        name: intervals.Interval(
            known(told["mean"]), known(told["low"]), known(told["high"]), told["count"]
        )
        for name, told in entry["figures"].items()
    }
    return Result(entry["suite"], entry["length"], entry["seed"], figures)


def _known(value: float | int) -> float | int | None:
    return None if math.isnan(value) else value
