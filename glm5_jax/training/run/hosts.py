"""The seconds of a step of every process, to find the one that the others wait for.

All processes end a step together, so their steps take the same time. They differ in how
long a process works on data and Python before it waits for the devices. A slow device
does not show here: all processes wait for it alike.
"""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Sequence

import jax
from absl import logging

from glm5_jax.processes import together

# A process is late if its own seconds exceed the others' by this share of a step and
# are this many times theirs.
LATE, TIMES = 0.1, 1.5
_FILE = "hosts.jsonl"


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Median seconds of a process, of the steps since the last call."""

    step: float
    own: float  # without waiting for devices


def tell(workdir: pathlib.Path, step: int, position: int, mine: Seconds) -> dict:
    """Collects the seconds of all processes; process 0 writes them to hosts.jsonl.

    All processes must call it after the same step.

    Args:
      workdir: of the run.
      step: steps done.
      position: batches drawn.
      mine: seconds of this process.

    Returns:
      Metrics on process 0 of several; else nothing.
    """
    if jax.process_count() == 1:
        return {}
    text = json.dumps(dataclasses.asdict(mine))
    said = together.to_first(f"hosts/{position}", text)
    if not said:
        return {}
    found = [Seconds(**json.loads(text)) for text in said]
    by_name = {
        f"{name}_seconds": [getattr(seconds, name) for seconds in found]
        for name in ("step", "own")
    }
    with (workdir / _FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **by_name}) + "\n")
    if late := straggler(found):
        logging.warning("Step %d: %s", step, late)
    return metrics(found)


def metrics(found: Sequence[Seconds]) -> dict[str, int | float]:
    """Returns the number and seconds of the slowest process, and the median seconds."""
    own = [seconds.own for seconds in found]
    return {
        "hosts/slowest": own.index(max(own)),
        "hosts/own_seconds_max": round(max(own), 5),
        "hosts/own_seconds_median": round(statistics.median(own), 5),
        "hosts/step_seconds_max": round(max(seconds.step for seconds in found), 5),
    }


def straggler(found: Sequence[Seconds]) -> str:
    """Returns a sentence on the process that the others wait for, or nothing."""
    own = [seconds.own for seconds in found]
    slowest = own.index(max(own))
    others = statistics.median(own[:slowest] + own[slowest + 1 :])
    late = own[slowest] - others
    if late < LATE * found[slowest].step or own[slowest] < TIMES * others:
        return ""
    return (
        f"process {slowest} of {len(own)} takes {own[slowest]:.3f} s of its own of a "
        f"step of {found[slowest].step:.3f}, the others {others:.3f}: all wait for it. "
        f"Check its data, its CPU and its host."
    )
