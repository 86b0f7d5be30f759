"""Reads the lines of a metrics.jsonl, without jax."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the objects of a metrics.jsonl; skips damaged lines."""
    records = []
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        record = _record(line)
        if record is not None:
            records.append(record)
        else:
            logging.warning("%s: skipping a damaged line: %r", path, line[:80])
    return records


def once_a_step(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines that count: a step that goes back undoes those after it."""
    kept: list[dict[str, Any]] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def finite(tree: Any) -> Any:
    """Returns a tree with None for numbers that are not finite, for JSON."""
    if isinstance(tree, Mapping):
        return {name: finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(value) for value in tree]
    is_number = not isinstance(tree, float) or math.isfinite(tree)
    return tree if is_number else None


def _record(line: str) -> dict[str, Any] | None:
    """Returns the object of a line if a run can have written it, else None."""
    try:
        record = finite(json.loads(line))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    has_numbers = all(isinstance(x, int | float | None) for x in record.values())
    return record if has_numbers else None
