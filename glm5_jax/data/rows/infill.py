"""Fill-in-the-middle: moves the middle of some documents to their end.

Bavarian et al. 2022 (arXiv 2207.14255); GLM-4.5 does so with all source code.
"""

import dataclasses
import hashlib
from collections.abc import Collection

from glm5_jax import config

PREFIX, MIDDLE, SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"
SPM_RATE = 0.5


@dataclasses.dataclass(frozen=True)
class Infill:
    """The choice of documents to rearrange, a function of their names.

    Attributes:
        rate: fraction of the documents.
        spm_rate: fraction of those with the suffix before the prefix (SPM), as in the
            prompts of CodeGeeX4, of GLM's family; the others have the prefix first.
        seed: seeds the choice.
    """

    rate: float
    spm_rate: float = SPM_RATE
    seed: int = 0

    def arrange(self, name: str, text: str) -> list[tuple[str | None, str]]:
        """Returns the parts of a text in their new order, each with its special token.

        PSM is prefix, suffix, middle; SPM is suffix, prefix, middle. Both cuts are
        uniform over characters. An unchanged document has no special token.
        """
        chosen, order, *places = _uniform(f"{self.seed}:{name}")
        if chosen >= self.rate:
            return [(None, text)]
        first, second = sorted(int(place * (len(text) + 1)) for place in places)
        prefix, suffix = (PREFIX, text[:first]), (SUFFIX, text[second:])
        halves = [suffix, prefix] if order < self.spm_rate else [prefix, suffix]
        return [*halves, (MIDDLE, text[first:second])]


def check(special_tokens: Collection[str]) -> None:
    """Checks that a tokenizer's special tokens suffice.

    Raises:
        config.InputError: one is missing.
    """
    names = (PREFIX, MIDDLE, SUFFIX)
    missing = [name for name in names if name not in special_tokens]
    if missing:
        raise config.InputError(
            f"fim_rate needs special tokens that the tokenizer lacks: "
            f"{' '.join(missing)}. Use tokenizer 'byte_chat' or 'bpe_chat', or a "
            f"tokenizer.json that has them; or set fim_rate to 0."
        )


def _uniform(key: str) -> list[float]:
    """Returns four numbers in [0, 1) that depend only on the key."""
    digest = hashlib.sha256(f"fim:{key}".encode()).digest()
    words = (digest[i : i + 8] for i in range(0, 32, 8))
    # 53 bits are exact in a float64 below 1.
    return [(int.from_bytes(word) >> 11) / 2**53 for word in words]
