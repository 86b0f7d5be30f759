"""Settings of a run's health checks: loss spikes, NaNs and steps that hang."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Limits of a healthy run, and reactions to a step that exceeds them.

    A rollback restores the newest checkpoint and resumes with the batch after the
    offending one: every batch since the checkpoint is skipped for good.
    """

    # Nats above the median of the last 64 training losses that make a loss a spike.
    spike_nats: float = 2.0
    on_spike: Literal["count", "roll_back", "abort"] = "count"  # reaction to a spike
    # Skipped updates in a row that trigger on_not_finite; an update is skipped if its
    # gradient is not finite.
    max_skipped_in_a_row: int = 10
    # Reaction to max_skipped_in_a_row skipped updates.
    on_not_finite: Literal["roll_back", "abort"] = "abort"
    max_rollbacks: int = 3  # most rollbacks of a run; the next failure ends it
    # Seconds after which a run ends if no step finishes, or 10 times the median step if
    # that is longer; the stacks of all threads go to its folder. 0: waits for ever.
    watchdog_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            *checks.positive(self, "max_skipped_in_a_row"),
            (self.spike_nats > 0, f"spike_nats must be > 0, got {self.spike_nats}."),
            (
                self.max_rollbacks >= 0,
                f"max_rollbacks must not be negative, got {self.max_rollbacks}.",
            ),
            (
                self.watchdog_seconds >= 0,
                f"watchdog_seconds must not be negative (0 turns it off), got "
                f"{self.watchdog_seconds}.",
            ),
        )
