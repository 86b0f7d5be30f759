"""The protocol between the loop and a stage's feed: a corpus, or rollouts.

Three counts have these names everywhere:
  step: steps done. A step learns from one batch, in config.updates_per_step updates. A
    rollback lowers it.
  position: batches drawn from the feed: those of the steps done, and those that
    rollbacks skipped. It never falls, so no batch comes twice.
  version: of weights that an engine samples with: the position that they were published
    at, where one set of parameters is trained.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib

Batch = dict[str, np.ndarray]
Metrics = Mapping[str, Any]
ToDevices = Callable[[Batch], Mapping[str, Any]]  # puts a batch on the devices


@runtime_checkable
class Feed(Protocol):
    """Batches, evaluations and samples of a stage."""

    tokenizer: tokenizer_lib.Tokenizer
    fingerprint: str  # equal ones give equal batches
    is_on_policy: bool  # a batch needs the weights of the step before
    tells_of_stalls: bool  # it raises if a batch does not come, which may take hours

    def begin(self, workdir: pathlib.Path, step: int) -> None:
        """Uses the folder of a run, of which `step` steps are done, from now on."""
        ...

    def restrict_to(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Makes only the rows of this process from now on, by the size of a batch."""
        ...

    def prepare(self, params: dict, to_devices: ToDevices) -> None:
        """Compiles programs of `evaluate` and `sample` by running them once."""
        ...

    def next(self, params: dict, position: int) -> tuple[Batch, Metrics]:
        """Returns the batch at a position, and what to log about it.

        The tokens of a batch are data/batch_tokens, padding included, or
        rollout/tokens.
        """
        ...

    def keep(self, step: int, advantages: jax.Array | None) -> None:
        """Writes into the run's folder what is to be kept of the last batch.

        Args:
          step: that learns from the batch.
          advantages: of the batch's targets, [B, T], which a critic gave; None: the
            batch has them.
        """
        ...

    def check(self, metrics: Metrics, step: int) -> None:
        """Raises an error if the measurements of a step must end the run.

        The loop asks before it uses the new parameters. Reading a value of `metrics`
        waits for the device.
        """
        ...

    def evaluate(
        self, params: dict, position: int, to_devices: ToDevices
    ) -> dict[str, float]:
        """Returns held-out figures of the parameters at a position."""
        ...

    def evaluate_beside(self, params: dict, position: int) -> bool:
        """Begins an evaluation, whose figures come with a later batch's metrics.

        Returns:
          False if none can go on beside the training: `evaluate` is for those.
        """
        ...

    def sample(self, params: dict) -> str:
        """Returns a text that shows what the model does."""
        ...

    def memory(self, position: int) -> Mapping[str, Any]:
        """Returns what a checkpoint of a position must keep; it fits JSON."""
        ...

    def resume(self, memory: Mapping[str, Any]) -> None:
        """Continues from what `memory` returned; {} begins."""
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...
