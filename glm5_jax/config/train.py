"""A whole run: its mesh, and the stage that uses every section."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from glm5_jax.config import checks
from glm5_jax.config.data import DataConfig
from glm5_jax.config.health import HealthConfig
from glm5_jax.config.model import ModelConfig
from glm5_jax.config.optim import LossConfig, OptimConfig
from glm5_jax.config.rl import RLConfig

TRACKERS = ("tensorboard", "wandb")
Stage = Literal["pretrain", "dsa_warmup", "dsa_sparse", "sft", "rl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each mesh axis; data = -1 takes what the others leave."""

    # Slices of TPUs: the data axis alone goes across them. Hosts of GPUs may be counted
    # as slices too; with 1 every axis may go across hosts.
    slices: int = 1
    # Devices that hold whole copies and other rows; -1: all that the other axes leave.
    data: int = -1
    fsdp: int = 1  # devices that share rows, parameters and optimizer state
    expert: int = 1  # devices that share the experts
    # Devices that share attention heads, hidden dims of experts and the vocabulary.
    tensor: int = 1
    context: int = 1  # devices that share the tokens of a row

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """Axes that go across slices, over a network slower than links."""
        return ("data",) if self.slices > 1 else ()

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            (
                self.data == -1 or self.data >= 1,
                f"data must be -1 or >= 1: {self.data}",
            ),
            *checks.positive(
                self,
                *("slices", "fsdp", "expert", "tensor", "context"),
                most=checks.MAX_SIZE,
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    # What is trained, and on what: the paper's stages in their order.
    stage: Stage = "pretrain"
    # Run, step or Hugging Face folder whose parameters the run starts from.
    init_from: str | None = None
    # Fields of model that change the logits, and may differ from those of init_from.
    init_from_changes: tuple[str, ...] = ()
    # Number that initial parameters, order of data and sampling follow from.
    seed: int = 0
    num_steps: int = 100  # updates of the whole run
    log_every: int = 1  # steps between lines of metrics.jsonl
    eval_every: int = 50  # steps between held-out evaluations; 0: only at the end
    eval_batches: int = 8  # held-out batches of an evaluation
    # Lets evaluations of stage sft play held-out tasks of rl.environment too.
    eval_success: bool = False
    # Figure of evaluations that ends the run where it gets to stop_at: eval/success
    # from below, eval/bits_per_byte from above. The schedule is laid over num_steps.
    stop_metric: Literal["", "eval/success", "eval/bits_per_byte"] = ""
    stop_at: float = 0.0  # value of stop_metric that ends the run
    sample_every: int = 0  # steps between sample texts; 0: only at the end
    # Text that a sample continues, or in stage sft answers.
    sample_prompt: str = "def __init__(self"
    sample_tokens: int = 96  # length of a sample; 0: no sample
    checkpoint_every: int = 100  # steps between checkpoints; 0: only at the end
    checkpoints_to_keep: int = 3  # newest checkpoints that stay
    # Checkpoints of steps divisible by it stay for ever; 0: none.
    checkpoints_keep_every: int = 0
    # As many more stay by evaluation: those of the lowest eval/bits_per_byte, in stage
    # rl of the highest eval/success.
    checkpoints_keep_best: int = 0
    # First and last step of a profile in the run's folder, as (10, 12); (): none.
    profile_steps: tuple[int, ...] = ()
    trackers: tuple[str, ...] = ()  # "tensorboard", "wandb": metrics go there as well
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    rl: RLConfig = RLConfig()
    health: HealthConfig = HealthConfig()

    def __post_init__(self) -> None:
        """Decides on batch invariance, and checks what involves several sections."""
        if self.stage == "rl" and self.model.batch_invariant is None:
            self._make_batch_invariant()
        length, topk = self.data.sequence_length, self.model.index_topk
        has_kl = self.model.attention != "dense" and self.loss.indexer_weight > 0
        has_kl &= self.stage != "rl"  # there the indexer is frozen
        is_dsa = self.stage in ("dsa_warmup", "dsa_sparse")
        mode = {"dsa_warmup": "dense_with_indexer_loss", "dsa_sparse": "sparse"}
        checks.require(
            *checks.choices(self),
            *checks.positive(self, "num_steps", "log_every", "checkpoints_to_keep"),
            *checks.positive(self, "eval_batches"),
            checks.seed_rule(self.seed),
            (
                not is_dsa or self.model.attention == mode[self.stage],
                f"model.attention must be {mode.get(self.stage)!r} in stage "
                f"{self.stage!r}, got {self.model.attention!r}.",
            ),
            (
                not is_dsa or self.loss.indexer_weight > 0,
                f"loss.indexer_weight must be > 0 in stage {self.stage!r}: it is "
                f"what trains the indexer.",
            ),
            (
                not (has_kl or is_dsa) or topk < length,
                f"model.index_topk must be smaller than data.sequence_length where "
                f"the indexer is trained by its KL, got {topk} >= {length}: there "
                f"would be nothing to select. Lower model.index_topk, or set "
                f"model.attention='dense' or loss.indexer_weight=0.",
            ),
            (
                length <= self.model.max_position_embeddings,
                f"data.sequence_length must not exceed "
                f"model.max_position_embeddings "
                f"({self.model.max_position_embeddings}), got {length}.",
            ),
            *(
                (getattr(self, k) >= 0, f"{k} must not be negative; 0 turns it off.")
                for k in (
                    *("eval_every", "sample_every", "sample_tokens"),
                    *("checkpoints_keep_every", "checkpoints_keep_best"),
                )
            ),
            (self.checkpoint_every >= 0, "checkpoint_every must not be negative."),
            *self._init_rules(),
            *self._watching_rules(),
            *self._checkpoint_rules(),
            *self._stop_rules(),
            *self._rl_rules(),
            *self._mesh_rules(),
        )

    @property
    def num_updates(self) -> int:
        """Updates of the whole run, which the learning rate's schedule counts."""
        is_rl = self.stage == "rl"
        return self.num_steps * (self.rl.updates_per_rollout if is_rl else 1)

    def has_reached(self, evaluation: Mapping[str, Any]) -> bool:
        """Returns whether an evaluation ends the run by stop_metric and stop_at."""
        value = evaluation.get(self.stop_metric)
        if value is None:
            return False
        is_better_below = self.stop_metric == "eval/bits_per_byte"
        return value <= self.stop_at if is_better_below else value >= self.stop_at

    def _make_batch_invariant(self) -> None:
        """Lets trainer and engine agree in bfloat16; in float32 they nearly do."""
        model = self.model
        if model.dtype == "bfloat16" and model.attention == "sparse":
            model = dataclasses.replace(model, batch_invariant=True)
            object.__setattr__(self, "model", model)

    def _init_rules(self) -> list[tuple[bool, str]]:
        """Rules: what may differ from init_from is of the model."""
        return [
            (
                name in ModelConfig.__dataclass_fields__,
                f"init_from_changes must name fields of model, got {name!r}.",
            )
            for name in self.init_from_changes
        ]

    def _watching_rules(self) -> list[tuple[bool, str]]:
        """Rules: trackers are known, and the steps of a profile are there, in order."""
        steps, last = self.profile_steps, self.num_steps
        is_range = len(steps) == 2 and 1 <= steps[0] <= steps[1] <= last
        return [
            (
                not steps or is_range,
                f"profile_steps must be the first and the last step of 1..{last} "
                f"(num_steps), as (10, 12), got {steps}.",
            ),
            *(
                (name in TRACKERS, f"trackers knows {TRACKERS}, got {name!r}.")
                for name in self.trackers
            ),
        ]

    def _checkpoint_rules(self) -> list[tuple[bool, str]]:
        """Rules: what shall be kept, must be written, and be evaluated before."""
        saves, keeps = self.checkpoint_every, self.checkpoints_keep_every
        evaluates = self.eval_every
        return [
            (
                keeps <= 0 or (saves > 0 and keeps % saves == 0),
                f"checkpoints_keep_every must be a multiple of checkpoint_every, or 0, "
                f"got {keeps} and {saves}: other steps are not saved.",
            ),
            (
                self.checkpoints_keep_best <= 0
                or (saves > 0 and evaluates > 0 and saves % evaluates == 0),
                f"checkpoints_keep_best needs evaluations of the steps that are saved: "
                f"checkpoint_every must be a multiple of eval_every, got {saves} and "
                f"{evaluates}.",
            ),
        ]

    def _stop_rules(self) -> list[tuple[bool, str]]:
        """Rules: a warm-up ends before the run; what a run waits for, it evaluates."""
        is_rl, is_success = self.stage == "rl", self.stop_metric == "eval/success"
        return [
            (
                self.optim.warmup_steps < self.num_updates,
                f"optim.warmup_steps must be smaller than num_steps, got "
                f"{self.optim.warmup_steps} of {self.num_updates} updates; shorten "
                f"the warm-up or train longer.",
            ),
            (
                not self.eval_success or self.stage == "sft",
                f"eval_success is for stage 'sft', got stage {self.stage!r}; stage "
                f"'rl' measures success anyway.",
            ),
            (
                not self.stop_metric or self.eval_every > 0,
                f"stop_metric {self.stop_metric!r} needs evaluations; set eval_every "
                f"to the steps between them.",
            ),
            (
                not is_success or is_rl or self.eval_success,
                "stop_metric 'eval/success' needs stage 'rl', or stage 'sft' with "
                "eval_success=true and the task in rl.environment.",
            ),
            (
                not is_rl or self.stop_metric != "eval/bits_per_byte",
                "stage 'rl' has no eval/bits_per_byte; set stop_metric='eval/success'.",
            ),
            (
                not self.stop_metric or 0 < self.stop_at <= (1 if is_success else 99),
                f"stop_at must lie in 0..1 for eval/success and be > 0 for "
                f"eval/bits_per_byte, got {self.stop_at}.",
            ),
        ]

    def _rl_rules(self) -> list[tuple[bool, str]]:
        """Rules: an episode must fit a row, and each update has whole parts."""
        length, new = self.data.sequence_length, self.rl.max_new_tokens
        return [
            (
                self.stage != "rl" or new < length,
                f"rl.max_new_tokens must be smaller than data.sequence_length, which "
                f"has to hold prompt and answers, got {new} >= {length}.",
            ),
        ]

    def batch_rule(self, num_shares: int) -> tuple[bool, str]:
        """Rule: so many devices of data * fsdp * expert get as many rows each."""
        is_rl, parts = self.stage == "rl", self.optim.accumulation_steps
        updates = self.rl.updates_per_rollout if is_rl else 1
        axes = "data * fsdp * expert" + " * accumulation_steps" * (parts > 1)
        return checks.whole(
            "rl.prompts_per_step * rl.group_size" if is_rl else "data.batch_size",
            self.rl.num_rows if is_rl else self.data.batch_size,
            axes + " * updates_per_rollout" * (updates > 1),
            num_shares * parts * updates,
            "give devices to mesh.tensor or mesh.context",
        )

    def _mesh_rules(self) -> list[tuple[bool, str]]:
        """Rules: what a mesh axis shards, it must divide."""
        mesh, model = self.mesh, self.model
        shares = mesh.fsdp * mesh.expert * max(mesh.data, 1)
        known = shares * mesh.context * mesh.tensor  # with data=-1 there are more
        stored = mesh.fsdp * mesh.context  # each matrix is cut into at least as many
        rules = [self.batch_rule(shares), *self._token_rules(known)]
        if self.stage == "rl" or self.eval_success:
            axes, parts = "data * fsdp * expert * context", shares * mesh.context
            remedy = "give devices to mesh.tensor"
            rules += [checks.whole("rl.slots", self.rl.slots, axes, parts, remedy)]
        for name, axes, parts in (
            ("hidden_size", "fsdp * context * expert", stored * mesh.expert),
            ("q_lora_rank", "fsdp * context * expert", stored * mesh.expert),
            ("kv_lora_rank", "fsdp * context", stored),
            ("n_routed_experts", "expert", mesh.expert),
            ("vocab_size", "tensor * expert", mesh.tensor * mesh.expert),
            ("num_attention_heads", "tensor", mesh.tensor),
            ("intermediate_size", "tensor", mesh.tensor),
            ("moe_intermediate_size", "tensor", mesh.tensor),
        ):
            size = getattr(model, name)
            near = checks.nearest_divisors(math.gcd(size, known), parts)
            remedy = f"{axes} to {checks.listed(near)}"
            rules.append(checks.whole(f"model.{name}", size, axes, parts, remedy))
        return rules

    def _token_rules(self, num_devices: int) -> list[tuple[bool, str]]:
        """Rules: tokens of a row are cut over context, and then into chunks."""
        length, context = self.data.sequence_length, self.mesh.context
        chunks, rules = self.model.expert_chunks, []
        name = "data.sequence_length"
        if chunks > 1:
            near = checks.nearest_divisors(max(length // context, 1), chunks)
            remedy = f"model.expert_chunks to {checks.listed(near)}"
            axes, parts = "context * expert_chunks", context * chunks
            rules.append(checks.whole(name, length, axes, parts, remedy))
        if context > 1:  # a device has an early and a late part of each row
            halves = 1 if length % 2 else math.gcd(length // 2, num_devices)
            near = checks.nearest_divisors(halves, context)
            remedy = f"context to {checks.listed(near)}"
            rules.append(checks.whole(name, length, "2 * context", 2 * context, remedy))
        return rules
