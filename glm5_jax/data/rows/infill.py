"""Fill-in-the-middle: some documents are learnt with their middle at the end.

Bavarian et al. 2022 (arXiv 2207.14255); GLM-4.5 does so with all source code.
"""

import dataclasses
import hashlib
from collections.abc import Collection

from glm5_jax import config

PREFIX, MIDDLE, SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"


@dataclasses.dataclass(frozen=True)
class Infill:
    """Which documents are rearranged, and how: a function of their names.

    Attributes:
        rate: fraction of the documents.
        spm_rate: fraction of those that have the suffix in front of the prefix (SPM),
            as CodeGeeX4, of GLM's family, is asked; the others have the prefix first.
        seed: of the choice.
    """

    rate: float
    spm_rate: float
    seed: int = 0

    def arrange(self, name: str, text: str) -> list[tuple[str | None, str]]:
        """Parts of the text in the order to be read, each behind its special token.

        PSM: prefix, suffix, middle; SPM: suffix, prefix, middle. Both cuts are uniform
        over characters. A document that is left as it is has no special token.
        """
        chosen, order, *places = _uniform(f"{self.seed}:{name}")
        if chosen >= self.rate:
            return [(None, text)]
        first, second = sorted(int(place * (len(text) + 1)) for place in places)
        prefix, suffix = (PREFIX, text[:first]), (SUFFIX, text[second:])
        halves = [suffix, prefix] if order < self.spm_rate else [prefix, suffix]
        return [*halves, (MIDDLE, text[first:second])]


def check(special_tokens: Collection[str]) -> None:
    """Checks that these, which a tokenizer has, are enough.

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
    """Four numbers in [0, 1) that depend on the key alone."""
    digest = hashlib.sha256(f"fim:{key}".encode()).digest()
    words = (digest[i : i + 8] for i in range(0, 32, 8))
    # 53 bits: what a float64 holds below 1.
    return [(int.from_bytes(word) >> 11) / 2**53 for word in words]
