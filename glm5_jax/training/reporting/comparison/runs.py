"""Reads the folders of runs that are compared."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from glm5_jax import config as config_lib
from glm5_jax.config import fields, recorded
from glm5_jax.storage import copies
from glm5_jax.training.reporting import records

RAN_ON = ("parameters", "device", "jax", "commit")  # of summary.json, at the end
SECONDS = "seconds"  # of the run until a step, over all of its starts
_KINDS = ("compile", "restore", "step", "evaluate", "sample", "save")
_MAX_NAMED = 3  # names in a message
Number = float | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder describes it."""

    name: str  # the shortest end of its path that no other run has
    path: pathlib.Path
    settings: Mapping[str, Any]  # its config by dotted name, and what it ran on
    lines: Sequence[Mapping[str, Any]]  # of metrics.jsonl, each step once

    def curve(self, metric: str) -> dict[int, Number]:
        """Returns the values of a metric by step, without those that are no number."""
        pairs = [(line["step"], line.get(metric)) for line in self.lines]
        return {step: value for step, value in pairs if _is_number(value)}


def read(given: Sequence[str]) -> list[Run]:
    """Reads the folders of two or more runs.

    Raises:
        InputError: has a line for every folder that is given twice or holds no run.
    """
    if len(given) < 2:
        raise config_lib.InputError(
            f"give the folders of two or more runs: python -m glm5_jax.compare RUN "
            f"RUN; got {' '.join(given) or 'nothing'}."
        )
    paths = [pathlib.Path(os.path.abspath(copies.local(p))) for p in given]
    names = _names(paths)
    runs, errors = [], []
    for i, path in enumerate(paths):
        try:
            if path in paths[:i]:
                raise config_lib.InputError(f"{given[i]} is given twice; give it once.")
            runs.append(_read(path, names[i]))
        except config_lib.InputError as error:
            errors.append(str(error))
    if errors:
        raise config_lib.InputError("\n".join(errors))
    return runs


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the shortest ends of paths that tell them apart."""
    names, length = [path.name for path in paths], 1
    while len(set(names)) < len(set(paths)):
        length += 1
        names = ["/".join(path.parts[-length:]) for path in paths]
    return names


def _read(path: pathlib.Path, name: str) -> Run:
    """Reads a run's folder.

    Raises:
        InputError: it is none, or no step is logged in it.
    """
    if not path.is_dir():
        others = [p.name for p in path.parent.glob("*") if p.is_dir()]
        guess = fields.did_you_mean(path.name, others, f"{path.parent}/")
        raise config_lib.InputError(f"{path} is no folder; give a run's.{guess}")
    config = _object(path / "config.json")
    if "num_steps" not in config:
        inside = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
        more = ", ".join(inside[:_MAX_NAMED]) + ", ..." * (len(inside) > _MAX_NAMED)
        hint = f" In it are the runs {more}." if inside else ""
        raise config_lib.InputError(
            f"{path} is not the folder of a run: it has no config.json of one.{hint}"
        )
    file = path / "metrics.jsonl"
    lines = records.once_a_step(records.read(file) if file.is_file() else [])
    if not lines:
        raise config_lib.InputError(
            f"{path} has no metrics: no step is logged in its metrics.jsonl; wait for "
            f"the run's first step, or leave it out."
        )
    summary = _object(path / "summary.json")
    ran_on = {key: summary[key] for key in RAN_ON if key in summary}
    return Run(
        name=name,
        path=path,
        settings=recorded.flat(config) | ran_on,
        lines=[line | _seconds(line) for line in lines],
    )


def _object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a file of JSON; {} where there is none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _seconds(line: Mapping[str, Any]) -> dict[str, Number]:
    """Returns the seconds of all that the run did until a step, where it logs them."""
    parts = [line.get(f"goodput/{kind}_seconds") for kind in _KINDS]
    known = [part for part in parts if _is_number(part)]
    return {SECONDS: round(sum(known), 3)} if known else {}


def _is_number(value: object) -> TypeGuard[Number]:
    return isinstance(value, int | float) and math.isfinite(value)
