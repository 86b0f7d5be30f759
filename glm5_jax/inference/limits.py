"""The sizes of an engine's dispatches that a caller rarely changes."""

import dataclasses

from glm5_jax.inference import requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that bound a dispatch, whatever requests come."""

    max_stop_ids: int = 8  # of a request
    # Tokens of prompts, padding included, that a device reads before the running
    # sequences draw again. One part of a prompt may exceed the rest of it, so that they
    # wait for less than prefill_tokens + chunk tokens.
    prefill_tokens: int = 8 * 2048

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
          InputError: a size is no integer, or too small.
        """
        requests.require_ints(0, max_stop_ids=self.max_stop_ids)
        requests.require_ints(1, prefill_tokens=self.prefill_tokens)
