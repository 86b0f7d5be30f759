"""Reads the lines of a metrics.jsonl, without jax."""

import json
import os
import pathlib
from typing import Any

from absl import logging


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the objects of a metrics.jsonl; skips a line that a crash cut off."""
    records = []
    text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError(line)
            records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            logging.warning("%s: skipping half a line: %r", path, line[:80])
    return records


def once_a_step(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines that count: a step that goes back undoes those after it."""
    kept: list[dict[str, Any]] = []
    for record in records:
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept
