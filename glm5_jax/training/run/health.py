"""The health of a run: spikes of the loss, and updates that are not finite."""

import collections
import math
import statistics
from collections.abc import Mapping
from typing import Any

from absl import logging

from glm5_jax import config as config_lib

WINDOW = 64  # losses that a spike is measured against
MIN_LOSSES = 16  # losses needed before one can be called a spike
SPIKES, ROLLBACKS = "health/spikes", "health/rollbacks"


class Health:
    """Judges every step by its metrics; checkpoints hold its memory.

    All processes of a run read the same metrics, so all judge alike.
    """

    def __init__(
        self, limits: config_lib.HealthConfig, num_steps: int, has_loss: bool = True
    ) -> None:
        """Begins a run.

        Args:
          limits: what counts as an accident.
          num_steps: of the run; a run that skips them all has failed.
          has_loss: whether the training loss says how training goes. The loss of a
            policy gradient is near zero and says nothing.
        """
        self._limits = limits
        self._max_skipped = min(limits.max_skipped_in_a_row, num_steps)
        self._has_loss = has_loss
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._num_spikes = self._num_rollbacks = 0

    def memory(self) -> dict[str, Any]:
        """Returns the memory, for JSON."""
        return {
            "losses": list(self._losses),
            "spikes": self._num_spikes,
            "rollbacks": self._num_rollbacks,
        }

    def counts(self) -> dict[str, int]:
        """Returns the accidents of the whole run; empty if there were none."""
        counts = {SPIKES: self._num_spikes, ROLLBACKS: self._num_rollbacks}
        return {name: count for name, count in counts.items() if count}

    def must_roll_back(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Judges a step; waits for its metrics.

        Raises:
          FloatingPointError: the step ends the run.
        """
        skipped = int(metrics["optim/skipped_in_a_row"])
        if skipped >= self._max_skipped:
            return self._accident(
                self._limits.on_not_finite,
                f"the gradients of {skipped} steps in a row, the last being {step}, "
                f"were not finite and were not applied. Lower optim.learning_rate, set "
                f"optim.clip_norm, set health.on_not_finite=roll_back, or resume from "
                f"an earlier checkpoint.",
            )
        loss = float(metrics["train/loss"])
        if skipped or not self._has_loss:
            return False
        usual = statistics.median(self._losses) if self._losses else loss
        is_spike = not loss - usual <= self._limits.spike_nats  # NaN is one
        if is_spike and len(self._losses) >= MIN_LOSSES:
            self._num_spikes += 1
            return self._accident(
                self._limits.on_spike,
                f"the loss of step {step} is {loss:.3f}, the median of the steps "
                f"before {usual:.3f}: more than health.spike_nats="
                f"{self._limits.spike_nats} apart.",
            )
        if math.isfinite(loss):
            self._losses.append(loss)
        return False

    def resume(self, memory: Mapping[str, Any]) -> None:
        """Restores the `memory` of a checkpoint."""
        self._losses = collections.deque(memory["losses"], WINDOW)
        self._num_spikes = memory["spikes"]
        self._num_rollbacks = memory["rollbacks"]

    def roll_back(self, memory: Mapping[str, Any]) -> None:
        """Restores the losses of a checkpoint and counts a rollback.

        Spikes and rollbacks since that checkpoint stay counted.
        """
        self._losses = collections.deque(memory["losses"], WINDOW)
        self._num_rollbacks += 1

    def _accident(self, action: str, message: str) -> bool:
        if action == "count":
            logging.warning("%s", message)
            return False
        if action == "abort":
            raise FloatingPointError(message)
        if self._num_rollbacks >= self._limits.max_rollbacks:
            raise FloatingPointError(
                f"{message} The run has already rolled back {self._num_rollbacks} "
                f"times (health.max_rollbacks)."
            )
        logging.error("ROLLING BACK: %s", message)
        return True
