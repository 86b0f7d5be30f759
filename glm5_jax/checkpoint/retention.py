"""Retention of checkpoints: the newest, every n-th forever, the best by a metric."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from glm5_jax.config import stages


class Step(NamedTuple):
    """The facts about a step that the rule uses."""

    number: int
    is_safe: bool  # it has a manifest
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """A rule for which steps may be deleted."""

    newest: int  # steps
    every: int = 0  # steps divisible by it stay forever; 0: none
    best: int = 0  # steps with the best metric, beside the newest
    metric: str = "eval/bits_per_byte"
    is_lower_better: bool = True

    def to_delete(self, steps: Iterable[Step]) -> list[int]:
        """Returns the numbers of the steps to delete, in order.

        A step is deleted once `newest` safe steps are newer than it. Steps without a
        manifest are not safe: they neither count as newer nor are among the best.
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
        """Returns the best steps; ties go to the newer one."""
        ranked = sorted(
            (value if self.is_lower_better else -value, -step.number)
            for step in steps
            if isinstance(value := step.metrics.get(self.metric), int | float)
            and math.isfinite(value)
        )
        return {-number for _, number in ranked[: self.best]}


def of_run(config: Mapping[str, Any]) -> Retention:
    """Returns the rule of a run, from the content of its config.json."""
    stage = stages.BY_NAME.get(config.get("stage", ""), stages.pretrain.STAGE)
    return Retention(
        newest=config["checkpoints_to_keep"],
        every=config.get("checkpoints_keep_every", 0),
        best=config.get("checkpoints_keep_best", 0),
        metric=stage.best.name,
        is_lower_better=not stage.best.is_higher_better,
    )
