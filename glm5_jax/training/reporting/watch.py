"""What a person sees of a run of reinforcement learning that is under way.

It reads metrics.jsonl and config.json, so it may be used on any machine that sees the
run's folder, and never disturbs the run.
"""

import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.training.reporting import metrics as metrics_lib

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 40  # steps of a curve
_CLEAR = "\x1b[H\x1b[2J"
_POLL_SECONDS = 2.0
Record = Mapping[str, Any]


def follow(
    workdir: pathlib.Path,
    say: Callable[[str], object],
    is_terminal: bool,
    poll_seconds: float = _POLL_SECONDS,
) -> None:
    """Shows the run until its summary.json is there; elsewhere than a terminal once.

    Args:
      workdir: folder of the run.
      say: prints a text.
      is_terminal: whether the text before can be cleared away.
      poll_seconds: between two looks.

    Raises:
      InputError: the folder holds no run.
    """
    path = workdir / "config.json"
    try:
        num_steps = json.loads(path.read_text(encoding="utf-8"))["num_steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise config_lib.InputError(
            f"--run must be the folder of a run, got {workdir}: {path} cannot be read "
            f"({error!r})."
        ) from error
    before = None
    while True:
        is_over = (workdir / "summary.json").exists()
        found = workdir / "metrics.jsonl"
        records = metrics_lib.read(found) if found.exists() else []
        text = "\n".join(view(records, workdir.name, num_steps))
        if text != before:
            say(f"{_CLEAR if is_terminal else ''}{text}")
        if is_over or not is_terminal:
            return
        before = text
        time.sleep(poll_seconds)


def view(records: Sequence[Record], name: str, num_steps: int) -> list[str]:
    """Returns the lines of what is known after the last record."""
    if not records:
        return [f"{name}: no step is logged yet"]
    last = records[-1]
    lines = [
        f"{name} · step {last['step']} of {num_steps}"
        f" · {_number(last.get('perf/step_seconds'))} s a step",
        f"{'episodes':12}{_episodes(last)}",
        f"{'reward':12}{_number(last.get('rollout/reward'))}"
        f"  {_curve([r.get('rollout/reward') for r in records])}",
        *_rewards_by_tag(records),
        f"{'staleness':12}at most {_number(last.get('rollout/staleness_max'))} versions"
        f", {_stale(last)} of the tokens are stale",
        f"{'idle':12}{_idle(last)}",
        *_ledger(last),
        *_held_out(records),
    ]
    return lines


def _episodes(last: Record) -> str:
    labels = _under(last, "rollout/label/")
    words = [f"{n:g} {label}" for label, n in labels.items() if n]
    return f"{last.get('rollout/episodes', 0):g} in this step: {', '.join(words)}"


def _rewards_by_tag(records: Sequence[Record]) -> Iterator[str]:
    """Yields a line for each tag that a recent step has played."""
    recent = records[-_SHOWN:]
    tags = {tag: None for r in recent for tag in _under(r, "rollout/reward/")}
    for tag in sorted(tags):
        values = [r.get(f"rollout/reward/{tag}") for r in recent]
        known = [v for v in values if v is not None]
        yield f"  {tag:10}{_number(known[-1] if known else None)}  {_curve(values)}"


def _stale(last: Record) -> str:
    stale = sum(_under(last, "rl/tokens/stale_").values())
    trained = last.get("rl/trained_tokens") or 0
    return _percent(stale / trained if trained else 0.0)


def _idle(last: Record) -> str:
    """Returns the shares of the step in which the trainer, and the engines, waited."""
    waited, whole = last.get("perf/rollout_seconds"), last.get("perf/step_seconds")
    parts = []
    if waited is not None and whole:
        parts.append(f"trainer {_percent(min(waited / whole, 1.0))}")
    if (engines := last.get("actors/engines_idle_share")) is not None:
        parts.append(f"engines {_percent(engines)}")
    return ", ".join(parts) or "unknown"


def _ledger(last: Record) -> Iterator[str]:
    """Yields the equation of the groups, and an alarm if it does not hold."""
    groups = _under(last, "groups/")
    if not groups:
        return
    begun = groups.pop("begun", 0)
    terms = " + ".join(f"{n:g} {name}" for name, n in sorted(groups.items()) if n)
    is_closed = begun == sum(groups.values())
    yield f"{'groups':12}{begun:g} begun {'=' if is_closed else '≠ (LOST)'} {terms}"


def _held_out(records: Sequence[Record]) -> Iterator[str]:
    measured = [r for r in records if r.get("eval/success") is not None]
    if measured:
        last = measured[-1]
        curve = _curve([r["eval/success"] for r in measured])
        share = _percent(last["eval/success"])
        yield f"{'held-out':12}{share} solved at step {last['step']}  {curve}"


def _under(record: Record, prefix: str) -> dict[str, float | int]:
    """Returns the metrics whose names begin so, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix) and value is not None
    }


def _curve(values: Sequence[float | None]) -> str:
    """Returns a bar for each of the last values, from the lowest to the highest."""
    shown = [v for v in values[-_SHOWN:] if v is not None]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_BARS[round((v - low) * scale)] for v in shown)
    return f"{bars}  {low:.3g} to {high:.3g}"


def _number(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}"
