"""The sizes of an engine's dispatches that a caller rarely changes."""

import dataclasses

from glm5_jax import config as config_lib
from glm5_jax.config import checks
from glm5_jax.inference import requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that bound a dispatch, whatever requests come."""

    max_stop_ids: int = 8  # of a request
    # Whether requests may have a bias, penalties and alternatives (adjustments.py).
    with_adjustments: bool = False
    # Tokens of prompts, padding included, that a device reads before the running
    # sequences draw again. One part of a prompt may exceed the rest of it, so that they
    # wait for less than prefill_tokens + chunk tokens.
    prefill_tokens: int = 8 * 2048
    # Pages of the cache, which sequences that begin alike share. 0: every slot has the
    # rows of a longest sequence for itself.
    num_pages: int = 0
    page_size: int = 64  # tokens

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
          InputError: a size is no integer, or too small.
        """
        zero = {"max_stop_ids": self.max_stop_ids, "num_pages": self.num_pages}
        requests.require_ints(0, **zero)
        one = {"prefill_tokens": self.prefill_tokens, "page_size": self.page_size}
        requests.require_ints(1, **one)

    def table(
        self, config: config_lib.ModelConfig, capacity: int, num_devices: int
    ) -> tuple[int, int] | None:
        """Returns the most pages of a sequence, and the pages of a device.

        Args:
          config: of the model.
          capacity: most tokens of a sequence.
          num_devices: devices with pages of their own.

        Returns:
          None without pages.

        Raises:
          InputError: the model or the devices cannot have these pages.
        """
        if not self.num_pages:
            return None
        width, number = -(-capacity // self.page_size), self.num_pages // num_devices
        checks.require(
            (
                not config.is_recurrent,
                "num_pages must be 0 for a model with recurrent layers, whose states "
                f"have no pages; got {self.num_pages}.",
            ),
            (
                self.num_pages % num_devices == 0,
                f"num_pages must be divisible by the {num_devices} devices with slots, "
                f"got {self.num_pages}.",
            ),
            (
                number >= width,
                f"num_pages must give each device at least the {width} pages of one "
                f"sequence of {capacity} tokens, got {number}.",
            ),
        )
        return width, number
