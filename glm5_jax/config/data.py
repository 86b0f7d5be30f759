"""Where tokens come from."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. Order is a pure function of (seed, step)."""

    # "python": the corpus every CPython carries; or a folder. In stage sft a folder or
    # a file of JSONL with conversations, or "tasks:NAME" for demonstrations.
    source: str = "python"
    # "bpe" (trained on the source), "byte", or the path of a tokenizer.json; for
    # conversations "bpe_chat" or "byte_chat", which have the special tokens.
    tokenizer: str = "bpe"
    bpe_vocab_size: int = 2048
    sequence_length: int = 256  # tokens that enter the model, per row
    batch_size: int = 16  # rows of a step, over all devices
    held_out_percent: int = 10  # documents by sha256(name) % 100 below this
    cache_dir: str = "~/.cache/glm5_jax"  # trained tokenizers, token arrays
    num_prefetch: int = 2  # batches made ahead by a thread
    chat_template: Literal["glm5", "glm5.1", "glm5.2"] = "glm5"
    # Whether turns are asked for with a thought; False where the data has none.
    enable_thinking: bool = True
    clear_thinking: bool = True  # False: thoughts before the last user message stay

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            *checks.positive(self, "sequence_length", "batch_size", "num_prefetch"),
            (
                self.bpe_vocab_size >= 300,
                f"bpe_vocab_size must be at least 300 (256 bytes and the special "
                f"tokens), got {self.bpe_vocab_size}.",
            ),
            (
                1 <= self.held_out_percent <= 50,
                f"held_out_percent must lie in 1..50, got {self.held_out_percent}.",
            ),
        )
