"""The sizes of an engine's dispatches that a caller rarely changes."""

import dataclasses
from typing import Literal

import jax

from glm5_jax import config as config_lib
from glm5_jax.config import checks, rl
from glm5_jax.inference import drafter as drafter_lib
from glm5_jax.inference import requests

Acceptance = Literal["same_noise", "rejection"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes that bound a dispatch, whatever requests come."""

    max_stop_ids: int = 8  # of a request
    # Whether requests may have a bias, penalties and alternatives (adjustments.py), and
    # constraints (guides.py).
    with_adjustments: bool = False
    # Tokens of prompts, padding included, that a device reads before the running
    # sequences draw again. One part of a prompt may exceed the rest of it, so that they
    # wait for less than prefill_tokens + chunk tokens.
    prefill_tokens: int = 8 * 2048
    # Pages of the cache, which sequences that begin alike share. 0: every slot has the
    # rows of a longest sequence for itself.
    num_pages: int = 0
    page_size: int = 64  # tokens
    # Pages in the host's memory, for those that others need on the device. 0: they are
    # dropped, and read again if a prompt begins with them.
    host_pages: int = 0
    # Most tokens that multi-token prediction drafts in a round (rounds.py). 0: none.
    num_drafts: int = 0
    adapts_drafts: bool = True  # drafts fewer, or none, where that is faster
    # How drafts are accepted, see verification.py: "same_noise", by which a completion
    # is the same as without drafts, or "rejection".
    acceptance: Acceptance = "same_noise"

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
          InputError: a size is no integer, or too small.
        """
        zero = "max_stop_ids", "num_pages", "host_pages"
        requests.require_ints(0, **{name: getattr(self, name) for name in zero})
        one = {"prefill_tokens": self.prefill_tokens, "page_size": self.page_size}
        requests.require_ints(1, **one)
        requests.require_ints(0, num_drafts=self.num_drafts)
        most = rl.MAX_DRAFTS
        checks.require(
            (
                self.num_drafts <= most,
                f"num_drafts must be at most {most}, got {self.num_drafts}.",
            ),
            (
                self.acceptance in ("same_noise", "rejection"),
                f"acceptance must be same_noise or rejection, got {self.acceptance!r}.",
            ),
            (
                self.acceptance == "same_noise" or self.num_drafts != 0,
                f"acceptance={self.acceptance} needs num_drafts above 0.",
            ),
        )

    @classmethod
    def of_prompts(cls, num_stop_ids: int, num_drafts: int) -> "Limits":
        """Returns the limits of a few prompts that all have these settings.

        Their rounds always have as many drafts: measuring others compiles programs.
        """
        most = max(num_stop_ids, cls.max_stop_ids)
        return cls(max_stop_ids=most, num_drafts=num_drafts, adapts_drafts=False)

    def drafter(self, config: config_lib.ModelConfig) -> drafter_lib.Drafter:
        """Returns what decides on the number of drafts.

        Raises:
          InputError: the model cannot draft.
        """
        modules, is_asked = config.num_nextn_predict_layers, self.num_drafts > 0
        checks.require(
            (
                not is_asked or modules == 1,
                "num_drafts must be 0 for a model without exactly one module of "
                f"multi-token prediction (model.num_nextn_predict_layers={modules}), "
                f"got {self.num_drafts}.",
            ),
            (
                not is_asked or not config.is_recurrent,
                "num_drafts must be 0 for a model with recurrent layers, whose states "
                f"cannot be set back; got {self.num_drafts}.",
            ),
        )
        # Several processes would not measure the same, and run different programs.
        adapts = self.adapts_drafts and jax.process_count() == 1
        return drafter_lib.Drafter(self.num_drafts, adapts)

    def errors(self, request: requests.Request) -> list[str]:
        """Returns what a request asks that these limits do not allow."""
        found, most = [], self.max_stop_ids
        if len(request.stop_ids) > most:
            found.append(
                f"stop_ids must have at most {most} ids (the engine's max_stop_ids), "
                f"got {len(request.stop_ids)}."
            )
        if request.is_adjusted and not self.with_adjustments:
            found.append(
                "logit_bias, penalties, num_alternatives and constraint need an "
                "engine whose limits have with_adjustments=True."
            )
        return found

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
        hosted = self.host_pages
        checks.require(
            (
                not hosted or self.num_pages > 0,
                f"host_pages needs num_pages, got {hosted} and {self.num_pages}.",
            ),
            (
                not hosted or num_devices == 1,
                f"host_pages must be 0 on several devices with slots, got {hosted} on "
                f"{num_devices}.",
            ),
        )
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
