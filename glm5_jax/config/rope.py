"""Settings of YaRN, which extends RoPE to contexts longer than those trained on."""

import dataclasses
import math
from typing import Literal

from glm5_jax.config import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071), by the names of Hugging Face's rope_parameters.

    The factors equal those of transformers, its conventions included: `mscale` and
    `mscale_all_dim` change the factor of the cosines only together, and
    `mscale_all_dim` alone changes the scale of the scores.
    """

    # Use of the fields below: "default" ignores them.
    rope_type: Literal["default", "yarn"] = "default"
    factor: float = 1.0  # ratio of the wanted context to the one trained on
    # Context trained on, in tokens; None: max_position_embeddings.
    original_max_position_embeddings: int | None = None
    # Turns over the context trained on, above which a dim keeps its wavelength.
    beta_fast: float = 32.0
    # Turns below which a dim's wavelength is multiplied by the whole factor.
    beta_slow: float = 1.0
    # Factor on cosines and sines; None: computed from the fields below.
    attention_factor: float | None = None
    mscale: float = 0.0  # weight in the factor on cosines and sines; 0: not given
    mscale_all_dim: float = 0.0  # weight in the factor on the scores; 0: not given
    truncate: bool = True  # round the range between the betas to whole dims

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
        """Returns whether wavelengths are extended."""
        return self.rope_type == "yarn"

    @property
    def rotation_factor(self) -> float:
        """Returns the factor on cosines and sines, in attention and indexer."""
        if not self.is_yarn:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    @property
    def score_factor(self) -> float:
        """Returns the factor on the scale of the attention scores."""
        if not (self.is_yarn and self.mscale_all_dim):
            return 1.0
        return self._scale(self.mscale_all_dim) ** 2

    def _scale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0
