"""What a run does when it does not go on as it should."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Limits beyond which a step is an accident, and what follows.

    A rollback restores the newest checkpoint and goes on with the batch after the
    offending one: all batches drawn since the checkpoint are skipped for good.
    """

    # A training loss so many nats above the median of the last 64 is a spike.
    spike_nats: float = 2.0
    on_spike: Literal["count", "roll_back", "abort"] = "count"  # what follows a spike
    # Updates that are not finite are skipped; after so many in a row on_not_finite
    # follows.
    max_skipped_in_a_row: int = 10
    # What follows so many skipped updates.
    on_not_finite: Literal["roll_back", "abort"] = "abort"
    max_rollbacks: int = 3  # most rollbacks of a run; the next accident ends it
    # Without a step for as long, or for 10 times the median step, the run ends, with
    # the stacks of all threads in its folder; 0: waits for ever.
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
