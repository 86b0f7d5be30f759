"""Where tokens come from."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks

ChatTemplate = Literal["glm5", "glm5.1", "glm5.2"]
DocumentKind = Literal["text", "conversations"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from. Order is a pure function of (seed, step)."""

    # "python": the corpus every CPython carries; or a folder. In stage sft a folder or
    # a file of JSONL with conversations, or "tasks:NAME" for demonstrations.
    # A folder of `glm5_jax.prepare` has its own tokenizer and held-out documents.
    source: str = "python"
    mixture: tuple[str, ...] = ()  # prepared folders instead of `source`
    # Weight of each folder in each stage of the mixture; default: equal ones.
    mixture_weights: tuple[tuple[float, ...], ...] = ()
    # Steps at which the stages of the mixture after the first begin.
    mixture_steps: tuple[int, ...] = ()
    # "bpe" (trained on the source), "byte", or the path of a tokenizer.json; for
    # conversations "bpe_chat" or "byte_chat", which have the special tokens.
    tokenizer: str = "bpe"
    bpe_vocab_size: int = 2048  # ids of a tokenizer that is trained on the source
    sequence_length: int = 256  # tokens that enter the model, per row
    batch_size: int = 16  # rows of a step, over all devices
    # Share of the documents kept for evaluation: sha256(name) % 100 below this.
    held_out_percent: int = 10
    # Folder that keeps trained tokenizers and token arrays.
    cache_dir: str = "~/.cache/glm5_jax"
    num_prefetch: int = 2  # batches that a thread makes ahead
    # Version of the format that conversations are written in.
    chat_template: ChatTemplate = "glm5"
    # Whether turns are asked for with a thought; False where the data has none.
    enable_thinking: bool = True
    # Whether thoughts before the last user message are left out.
    clear_thinking: bool = True

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            *checks.positive(
                self,
                *("sequence_length", "batch_size", "num_prefetch"),
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
        )

    def _mixture_rules(self) -> list[tuple[bool, str]]:
        """Rules: every stage has a weight for every source."""
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
    """How a corpus becomes rows on disk: `python -m glm5_jax.prepare`."""

    source: str  # "python", or a folder with documents: see DataConfig
    # "conversations": a .jsonl file or a folder of such, for stage sft; whole ones are
    # packed, with a mask of what is trained.
    kind: DocumentKind = "text"
    # "bpe", "byte", "bpe_chat", "byte_chat" or the path of a tokenizer.json.
    tokenizer: str = "bpe"
    bpe_vocab_size: int = 2048  # ids of a tokenizer that is trained on the source
    # Name of the JSON field or the column that holds the text; "": ArrayRecord's
    # records are the texts.
    field: str = "text"
    sequence_length: int = 4096  # tokens that enter the model, per row (paper App. A)
    # "truncate": documents joined and cut where a row ends (GLM-4.5's pre-training);
    # "best_fit": documents whole where they fit, the longest first (its mid-training).
    packing: Literal["truncate", "best_fit"] = "truncate"
    # Lengths in tokens, as (4096, 32768): longer documents go into folders of their
    # own.
    buckets: tuple[int, ...] = ()
    # Share of the documents kept for evaluation: sha256(name) % 100 below this.
    held_out_percent: int = 1
    # Fraction of the training documents whose middle moves to their end; for code.
    fim_rate: float = 0.0
    fim_spm_rate: float = 0.5  # fraction of those whose suffix comes first
    # Number that the order of documents and the cuts of fill-in-the-middle follow from.
    seed: int = 0
    # MiB of the source that a worker reads at once, for one shard.
    shard_mib: float = 128.0
    # Version of the format that conversations are written in; see DataConfig, which
    # must say the same.
    chat_template: ChatTemplate = "glm5"
    # Whether turns of conversations are asked for with a thought.
    enable_thinking: bool = True
    # Whether thoughts before the last user message are left out.
    clear_thinking: bool = True

    def __post_init__(self) -> None:
        """Checks every field."""
        rates = {name: getattr(self, name) for name in ("fim_rate", "fim_spm_rate")}
        checks.require(
            *checks.choices(self),
            *checks.positive(self, "sequence_length", most=checks.MAX_SIZE),
            (bool(self.source), "source is empty; name a folder, or 'python'."),
            (self.shard_mib > 0, f"shard_mib must be > 0, got {self.shard_mib}."),
            bpe_rule(self.bpe_vocab_size),
            held_out_rule(self.held_out_percent),
            *(
                (0 <= rate <= 1, f"{name} must lie in 0..1, got {rate}.")
                for name, rate in rates.items()
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
        """Rules: what is done to texts alone is not asked for."""
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
    """Rule: a BPE has an id for every byte."""
    return (
        300 <= bpe_vocab_size <= checks.MAX_SIZE,
        f"bpe_vocab_size must be at least 300 (256 bytes and the special tokens) and "
        f"at most {checks.MAX_SIZE}, got {bpe_vocab_size}.",
    )


def held_out_rule(held_out_percent: int) -> tuple[bool, str]:
    """Rule: some documents are held out, and most are not."""
    return (
        1 <= held_out_percent <= 50,
        f"held_out_percent must lie in 1..50, got {held_out_percent}.",
    )
