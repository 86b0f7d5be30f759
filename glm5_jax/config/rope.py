"""How rotary positions are stretched to contexts longer than those trained on."""

import dataclasses
import math
from typing import Literal

from glm5_jax.config import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071), by the names of Hugging Face's rope_parameters.

    What transformers computes from the same values, to its last convention: `mscale`
    and `mscale_all_dim` change the factor of the cosines only together, and
    `mscale_all_dim` alone changes the scale of the scores.
    """

    rope_type: Literal["default", "yarn"] = "default"  # "default": nothing below acts
    factor: float = 1.0  # context wanted over context trained on
    original_max_position_embeddings: int | None = None  # None: the model's
    beta_fast: float = 32.0  # turns over that context; dims with more stay as they are
    beta_slow: float = 1.0  # dims with fewer are stretched by the whole factor
    attention_factor: float | None = None  # on cosines and sines; None: from the rest
    mscale: float = 0.0  # 0: not given
    mscale_all_dim: float = 0.0  # 0: not given
    truncate: bool = True  # the range between the betas is rounded to whole dims

    def __post_init__(self) -> None:
        """Checks every field."""
        context, attention = (
            self.original_max_position_embeddings,
            self.attention_factor,
        )
        checks.require(
            *checks.choices(self),
            (self.factor >= 1, f"factor must be at least 1, got {self.factor}."),
            (
                context is None or context >= 1,
                f"original_max_position_embeddings must be at least 1, got {context}.",
            ),
            (
                self.beta_fast >= self.beta_slow >= 1e-6,
                f"beta_fast must be at least beta_slow, and that 1e-6, got "
                f"{self.beta_fast} and {self.beta_slow}.",
            ),
            (
                attention is None or attention > 0,
                f"attention_factor must be > 0, got {attention}.",
            ),
        )

    @property
    def is_yarn(self) -> bool:
        """Returns whether anything is stretched."""
        return self.rope_type == "yarn"

    @property
    def table_factor(self) -> float:
        """Returns the factor of cosines and sines, in attention and indexer."""
        if not self.is_yarn:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_factor(self) -> float:
        """Returns what the scale of the attention scores is multiplied by."""
        if not (self.is_yarn and self.mscale_all_dim):
            return 1.0
        return self._scale(self.mscale_all_dim) ** 2

    def _scale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0
