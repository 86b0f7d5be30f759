"""Settings of the training data, and of the command that prepares it."""

import dataclasses
import itertools
from typing import Literal

from glm5_jax.config import batches as batches_lib
from glm5_jax.config import checks

ChatTemplate = Literal["glm5", "glm5.1", "glm5.2"]
DocumentKind = Literal["text", "conversations"]
INTERLEAVE_TOKENS = 512  # tokens of a turn with packing "interleaved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The tokens of a run; their order is a pure function of (seed, step)."""

    # "python": the corpus that every CPython contains; or a folder. In stage sft a
    # folder or a file of JSONL with conversations, or "tasks:NAME" for demonstrations.
    # A folder that glm5_jax.prepare made has its own tokenizer and held-out documents.
    source: str = "python"
    mixture: tuple[str, ...] = ()  # prepared folders that replace source
    # Weight of each folder in each stage of the mixture; (): equal weights.
    mixture_weights: tuple[tuple[float, ...], ...] = ()
    # Steps at which the second and later stages of the mixture begin.
    mixture_steps: tuple[int, ...] = ()
    # "bpe" (trained on the source), "byte", or the path of a tokenizer.json; for
    # conversations "bpe_chat" or "byte_chat", which have the special tokens.
    tokenizer: str = "bpe"
    bpe_vocab_size: int = 2048  # ids of a tokenizer that is trained on the source
    sequence_length: int = 256  # tokens of a row
    batch_size: int = 16  # rows of a step, over all devices
    # Rows of a step at first, ascending to batch_size; (): batch_size from the start.
    # Each size is compiled once and applies to an equal share of batch_warmup_tokens.
    batch_warmup_sizes: tuple[int, ...] = ()
    # Tokens after which a step has batch_size rows.
    batch_warmup_tokens: float = 0.0
    # Percentage of the documents that are held out: sha256(name) % 100 below it.
    held_out_percent: int = 10
    # Folder for trained tokenizers and token arrays.
    cache_dir: str = "~/.cache/glm5_jax"
    # Version of the chat template of conversations.
    chat_template: ChatTemplate = "glm5"
    # Ask for turns with a thought; set it to false if the data has no thoughts.
    enable_thinking: bool = True
    # Omit thoughts before the last user message.
    clear_thinking: bool = True

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            checks.local_rule(self.cache_dir, "cache_dir"),
            *checks.choices(self),
            *checks.positive(
                self,
                "sequence_length",
                "batch_size",
                most=checks.MAX_SIZE,
            ),
            (
                self.batch_size * self.sequence_length <= checks.MAX_INT,
                f"batch_size times sequence_length must be at most {checks.MAX_INT} "
                f"tokens, got {self.batch_size} times {self.sequence_length}.",
            ),
            (
                bool(self.source or self.mixture),
                "source is empty; name a folder, or 'python'.",
            ),
            bpe_rule(self.bpe_vocab_size),
            held_out_rule(self.held_out_percent),
            *self._mixture_rules(),
            *self._warmup_rules(),
        )

    @property
    def batches(self) -> batches_lib.Batches:
        """Returns the number of rows of every step."""
        return batches_lib.growing(
            self.batch_warmup_sizes,
            self.batch_size,
            self.batch_warmup_tokens,
            self.sequence_length,
        )

    def _warmup_rules(self) -> list[tuple[bool, str]]:
        """Returns the rules of a batch size that grows."""
        sizes, tokens = self.batch_warmup_sizes, self.batch_warmup_tokens
        ascending = (0, *sizes, self.batch_size)
        return [
            (
                not sizes or all(a < b for a, b in itertools.pairwise(ascending)),
                f"batch_warmup_sizes must ascend and end below batch_size="
                f"{self.batch_size}, got {sizes}.",
            ),
            (
                bool(sizes) == (tokens > 0),
                f"batch_warmup_sizes and batch_warmup_tokens need each other, got "
                f"{sizes} and {tokens:g}: set both, or neither.",
            ),
        ]

    def _mixture_rules(self) -> list[tuple[bool, str]]:
        """Returns the rules that every stage has a weight for every folder."""
        steps, weights = self.mixture_steps, self.mixture_weights
        shape = len(steps) + 1, len(self.mixture)
        given = [len(stage) for stage in weights]
        return [
            (
                not (weights or steps) or given == [shape[1]] * shape[0],
                f"mixture_weights must be {shape[0]} times {shape[1]} numbers, for "
                f"each stage (one more than mixture_steps) a weight of each folder in "
                f"mixture; got {weights}.",
            ),
            (
                all(min(stage, default=0) >= 0 < sum(stage) for stage in weights),
                f"mixture_weights must not be negative, nor all 0 in a stage; got "
                f"{weights}.",
            ),
            (
                all(a < b for a, b in zip((0, *steps), steps, strict=False)),
                f"mixture_steps must be ascending and begin after 0, got {steps}.",
            ),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Settings of `python -m glm5_jax.prepare`, which makes rows of a corpus."""

    source: str  # "python", or a folder with documents: see DataConfig
    # "text", or "conversations" for stage sft: a .jsonl file or a folder of such, which
    # is packed uncut, with a mask of the trained tokens.
    kind: DocumentKind = "text"
    # "bpe", "byte", "bpe_chat", "byte_chat" or the path of a tokenizer.json.
    tokenizer: str = "bpe"
    bpe_vocab_size: int = 2048  # ids of a tokenizer that is trained on the source
    # Name of the JSON field or the column that holds the text; "": each record of
    # ArrayRecord is a text.
    field: str = "text"
    sequence_length: int = 4096  # tokens of a row (paper App. A)
    # "truncate": documents are joined, and cut at the end of a row (GLM-4.5's
    # pre-training); "best_fit": documents that fit a row stay whole, the longest are
    # placed first (its mid-training); "interleaved": similar documents share a row,
    # take turns in it, and see each other (GLM-5's mid-training).
    packing: Literal["truncate", "best_fit", "interleaved"] = "truncate"
    # Lengths in tokens, e.g. (4096, 32768); documents longer than each go into a folder
    # of their own.
    buckets: tuple[int, ...] = ()
    # Percentage of the documents that are held out: sha256(name) % 100 below it.
    held_out_percent: int = 1
    # Fraction of the training documents whose middle moves to the end, for code.
    fim_rate: float = 0.0
    # Seed of the order of documents and of the cuts of fill-in-the-middle.
    seed: int = 0
    # MiB of the source that a worker reads at once, for one shard.
    shard_mib: float = 128.0
    # Version of the chat template of conversations; DataConfig must have the same.
    chat_template: ChatTemplate = "glm5"
    # Ask for turns of conversations with a thought.
    enable_thinking: bool = True
    # Omit thoughts before the last user message.
    clear_thinking: bool = True

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            *checks.positive(self, "sequence_length", most=checks.MAX_SIZE),
            (
                self.packing != "interleaved"
                or self.sequence_length > INTERLEAVE_TOKENS,
                f"sequence_length must be larger than {INTERLEAVE_TOKENS}, the tokens "
                f"of a turn, with packing 'interleaved', got {self.sequence_length}.",
            ),
            (bool(self.source), "source is empty; name a folder, or 'python'."),
            (self.shard_mib > 0, f"shard_mib must be > 0, got {self.shard_mib}."),
            bpe_rule(self.bpe_vocab_size),
            held_out_rule(self.held_out_percent),
            (
                0 <= self.fim_rate <= 1,
                f"fim_rate must lie in 0..1, got {self.fim_rate}.",
            ),
            checks.seed_rule(self.seed),
            *self._conversation_rules(),
            (
                all(
                    a < b
                    for a, b in zip((0, *self.buckets), self.buckets, strict=False)
                ),
                f"buckets must be ascending lengths, got {self.buckets}.",
            ),
        )

    def _conversation_rules(self) -> list[tuple[bool, str]]:
        """Returns the rules that options of texts are not set for conversations."""
        is_text = self.kind == "text"
        return [
            (
                is_text or self.packing == "best_fit",
                f"packing must be 'best_fit' with kind 'conversations', which are not "
                f"cut where a row ends; got {self.packing!r}.",
            ),
            (
                is_text or not self.fim_rate,
                f"fim_rate must be 0 with kind 'conversations', got {self.fim_rate}.",
            ),
            (
                is_text or self.field == "text",
                f"field is of texts: conversations have 'messages' and 'tools'; leave "
                f"it out, got {self.field!r}.",
            ),
        ]


def bpe_rule(bpe_vocab_size: int) -> tuple[bool, str]:
    """Returns the rule that a BPE has an id for every byte."""
    return (
        300 <= bpe_vocab_size <= checks.MAX_SIZE,
        f"bpe_vocab_size must be at least 300 (256 bytes and the special tokens) and "
        f"at most {checks.MAX_SIZE}, got {bpe_vocab_size}.",
    )


def held_out_rule(held_out_percent: int) -> tuple[bool, str]:
    """Returns the rule that some documents are held out, but fewer than are trained."""
    return (
        1 <= held_out_percent <= 50,
        f"held_out_percent must lie in 1..50, got {held_out_percent}.",
    )
