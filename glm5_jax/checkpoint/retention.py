"""Which steps stay: the newest, every n-th for ever, the best by a metric."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """What the rule looks at."""

    number: int
    is_safe: bool  # it has a manifest
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """A rule for what may be deleted."""

    newest: int  # steps
    every: int = 0  # steps divisible by it stay for ever; 0: none
    best: int = 0  # steps with the best metric, beside the newest
    metric: str = "eval/bits_per_byte"
    is_lower_better: bool = True

    def to_delete(self, steps: Iterable[Step]) -> list[int]:
        """Numbers of the steps that may go, in order.

        A step goes when `newest` safe ones are newer than it: one without a manifest
        stands for none. The best are chosen among the safe ones.
        """
        steps = list(steps)
        safe = sorted(step.number for step in steps if step.is_safe)
        if len(safe) < self.newest:
            return []
        oldest = safe[-self.newest]
        best = self._best([step for step in steps if step.is_safe])
        return sorted(
            step.number
            for step in steps
            if step.number < oldest
            and step.number not in best
            and not (self.every and step.number % self.every == 0)
        )

    def _best(self, steps: list[Step]) -> set[int]:
        """Returns the best steps, of equal ones the newer."""
        sign = 1 if self.is_lower_better else -1
        ranked = sorted(
            (sign * value, -step.number)
            for step in steps
            if isinstance(value := step.metrics.get(self.metric), int | float)
            and math.isfinite(value)
        )
        return {-number for _, number in ranked[: self.best]}


def of_run(config: Mapping[str, Any]) -> Retention:
    """The rule that a run's config, as of its config.json, asks for."""
    is_rl = config.get("stage") == "rl"
    return Retention(
        newest=config["checkpoints_to_keep"],
        every=config.get("checkpoints_keep_every", 0),
        best=config.get("checkpoints_keep_best", 0),
        metric="eval/success" if is_rl else "eval/bits_per_byte",
        is_lower_better=not is_rl,
    )
