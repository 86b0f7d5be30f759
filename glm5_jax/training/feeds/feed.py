"""What the loop asks of whatever a stage learns from: a corpus, or rollouts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from glm5_jax.data import tokenizer as tokenizer_lib

Batch = dict[str, np.ndarray]
Metrics = Mapping[str, Any]
Place = Callable[[Batch], Mapping[str, Any]]  # puts a batch on the devices


@runtime_checkable
class Feed(Protocol):
    """Batches, evaluation and samples of a stage."""

    tokenizer: tokenizer_lib.Tokenizer
    fingerprint: str  # equal ones give equal batches
    is_on_policy: bool  # a batch needs the weights of the step before

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch, padding included."""
        ...

    def take(self, rows: Sequence[int]) -> None:
        """Takes these rows of the whole alone, this process's, from now on."""
        ...

    def next(self, params: dict, position: int) -> tuple[Batch, Metrics]:
        """A batch by its place in the stream, from 0, and what to log of it.

        `position` counts the updates behind the run and the batches that rollbacks
        have left out, so that none of them comes again.
        """
        ...

    def check(self, metrics: Metrics, step: int) -> None:
        """Raises where what update `step` measured must end the run.

        It is asked before anything is done with the new parameters; who looks at
        `metrics` waits for the device.
        """
        ...

    def evaluate(self, params: dict, step: int, place: Place) -> dict[str, float]:
        """Held-out figures after `step` updates."""
        ...

    def sample(self, params: dict, step: int) -> str:
        """A text that shows what the model does after `step` updates."""
        ...
