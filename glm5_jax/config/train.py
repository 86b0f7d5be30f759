"""A whole run: every section, and what involves several of them."""

import dataclasses
import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from glm5_jax.config import checks, stages
from glm5_jax.config.data import DataConfig
from glm5_jax.config.health import HealthConfig
from glm5_jax.config.mesh import MeshConfig
from glm5_jax.config.model import ModelConfig
from glm5_jax.config.optim import LossConfig, OptimConfig
from glm5_jax.config.quantization import QuantizationAware
from glm5_jax.config.rl import RLConfig

TRACKERS = ("tensorboard", "wandb")
# Settings that depend on the tokens that a run has trained on.
BY_TOKENS = (
    *("data.batch_warmup_sizes", "optim.warmup_tokens"),
    *("loss.mtp_weight_changes", "loss.router_bias_rate_changes"),
)
if TYPE_CHECKING:
    StageName = str
else:
    StageName = Literal[*stages.BY_NAME]  # so that --help and messages list them


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    # Stage of training: what it learns from, and what it trains (config/stages/).
    stage: StageName = "pretrain"
    # Run, step or Hugging Face folder that the run takes its first parameters from.
    init_from: str | None = None
    # Fields of model that change the logits and may still differ from init_from's.
    init_from_changes: tuple[str, ...] = ()
    # Scheme to which every step rounds the weights that it computes with, so that they
    # lose little when they are quantized.
    quantization_aware: QuantizationAware = "none"
    # Seed of the initial parameters, the order of the data and the sampling.
    seed: int = 0
    num_steps: int = 100  # steps of the whole run, a batch each
    log_every: int = 1  # steps between lines of metrics.jsonl
    eval_every: int = 50  # steps between held-out evaluations; 0: only at the end
    eval_batches: int = 8  # held-out batches of an evaluation
    # Suites of evaluations, as ("needle", "recall"); docs/evaluation.md lists them.
    eval_suites: tuple[str, ...] = ()
    # Tokens of a suite's tasks; (): data.sequence_length.
    eval_suite_lengths: tuple[int, ...] = ()
    eval_suite_tasks: int = 32  # tasks of a suite and length
    # Evaluations of stage sft also play held-out tasks of rl.environment.
    eval_success: bool = False
    # Figure of the evaluations that ends the run once it reaches stop_at: eval/success
    # from below, eval/bits_per_byte from above. The schedule still spans num_steps.
    stop_metric: Literal["", "eval/success", "eval/bits_per_byte"] = ""
    stop_at: float = 0.0  # value of stop_metric that ends the run
    sample_every: int = 0  # steps between sample texts; 0: only at the end
    # Text that a sample continues; in stage sft a question that it answers.
    sample_prompt: str = "def __init__(self"
    sample_tokens: int = 96  # length of a sample; 0: no sample
    checkpoint_every: int = 100  # steps between checkpoints; 0: only at the end
    checkpoints_to_keep: int = 3  # number of newest checkpoints to keep
    # Also keep for ever the checkpoints of steps divisible by it; 0: none.
    checkpoints_keep_every: int = 0
    # Also keep the N best by evaluation: of the lowest eval/bits_per_byte, in stage rl
    # of the highest eval/success.
    checkpoints_keep_best: int = 0
    # Steps between copies of its shards that each host keeps by itself; 0: none.
    host_copy_every: int = 0
    # Their folder, in a host's memory or on its disk; $NAME is an environment variable.
    host_copy_folder: str = "/dev/shm"
    # First and last step of a profile, which goes into the run's folder, as (10, 12);
    # (): no profile.
    profile_steps: tuple[int, ...] = ()
    # "tensorboard", "wandb": trackers that get the metrics as well.
    trackers: tuple[str, ...] = ()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    rl: RLConfig = RLConfig()
    health: HealthConfig = HealthConfig()

    def __post_init__(self) -> None:
        """Takes the defaults of the stage, and checks what involves several sections.

        Raises:
          InputError: with the message of every broken rule.
        """
        if self.stage not in stages.BY_NAME:
            checks.require(*checks.choices(self))  # the other rules ask the record
        stage = self.stage_record
        object.__setattr__(self, "model", stage.model_defaults(self.model))
        length, topk = self.data.sequence_length, self.model.index_topk
        has_kl = self.has_indexer_loss or stage.attention is not None
        checks.require(
            *checks.choices(self),
            *checks.positive(self, "num_steps", "log_every", "checkpoints_to_keep"),
            *checks.positive(self, "eval_batches", "eval_suite_tasks"),
            checks.seed_rule(self.seed),
            (
                stage.attention in (None, self.model.attention),
                f"model.attention must be {stage.attention!r} in stage "
                f"{self.stage!r}, got {self.model.attention!r}.",
            ),
            *stage.rules(self),
            (
                not has_kl or topk < length,
                f"model.index_topk must be smaller than data.sequence_length where "
                f"the indexer is trained by its KL, got {topk} >= {length}: there "
                f"would be nothing to select. Lower model.index_topk, or set "
                f"model.attention='dense' or loss.indexer_weight=0.",
            ),
            (
                length <= self.model.max_position_embeddings,
                f"data.sequence_length must not exceed model.max_position_embeddings "
                f"({self.model.max_position_embeddings}), got {length}.",
            ),
            *(
                (getattr(self, k) >= 0, f"{k} must not be negative; 0 turns it off.")
                for k in (
                    *("eval_every", "sample_every", "sample_tokens"),
                    *("checkpoint_every", "checkpoints_keep_every"),
                    *("checkpoints_keep_best", "host_copy_every"),
                )
            ),
            *self._init_rules(),
            *self._watching_rules(),
            *self._checkpoint_rules(),
            *self._stop_rules(),
            *self._mesh_rules(),
        )

    @property
    def stage_record(self) -> stages.Stage:
        """All that is particular to the stage."""
        return stages.BY_NAME[self.stage]

    @property
    def num_rows(self) -> int:
        """Rows of a step, over all devices."""
        fields = self.stage_record.rows_of(self)
        return math.prod(operator.attrgetter(field)(self) for field in fields)

    @property
    def updates_per_step(self) -> int:
        """Updates of a step, each on an equal part of its rows."""
        path = self.stage_record.updates
        return operator.attrgetter(path)(self) if path else 1

    @property
    def num_updates(self) -> int:
        """Updates of the whole run, which the learning rate's schedule counts."""
        return self.num_steps * self.updates_per_step

    def num_parts(self, num_rows: int) -> int:
        """Returns the parts of a batch that are computed in turn.

        A part of a smaller batch at the beginning of a run has no more rows than a part
        of data.batch_size rows, so that it needs no more memory.
        """
        parts = self.optim.accumulation_steps
        if num_rows not in self.data.batch_warmup_sizes:
            return parts
        return -(-num_rows * parts // self.data.batch_size)

    @property
    def has_indexer_loss(self) -> bool:
        """True where the indexers learn from their divergence from the attention."""
        has_weight = self.loss.indexer_weight > 0
        has_indexer = self.model.has_indexer
        return has_indexer and has_weight and self.stage_record.computes("indexer_kl")

    @property
    def trains_mtp_along(self) -> bool:
        """True where MTP learns beside a policy, which it does not change."""
        return self.rl.trains_mtp and self.stage_record.update == "policy"

    def is_trained(self, path: tuple[str, ...]) -> bool:
        """Tells whether the run trains the parameter with this path."""
        is_of_mtp = "mtp" in path and "indexer" not in path
        return self.stage_record.trains(path) or (self.trains_mtp_along and is_of_mtp)

    @property
    def num_mtp_steps(self) -> int:
        """Runs of the module for later tokens in the loss of a step."""
        later = [weight for _, weight in self.loss.mtp_weight_changes]
        has_loss = self.model.has_mtp and max(self.loss.mtp_weight, *later, 0) > 0
        is_computed = self.stage_record.computes("mtp") or self.trains_mtp_along
        return self.model.mtp_num_steps if has_loss and is_computed else 0

    @property
    def reference(self) -> str | None:
        """Folder of the policy that a term of the loss stays near; None: no term."""
        is_used = self.rl.kl_weight > 0 and self.stage_record.update == "policy"
        return (self.rl.reference or self.init_from) if is_used else None

    @property
    def teachers(self) -> tuple[str, ...]:
        """Folders of the policies that give the advantages of a stage that has some."""
        return self.rl.teachers if self.stage_record.has_teachers else ()

    @property
    def num_other_policies(self) -> int:
        """Copies of the weights that a run reads beside those that learn."""
        return (self.reference is not None) + len(self.teachers)

    @property
    def replays_routing(self) -> bool:
        """True where the trainer routes tokens to the experts that the engine chose."""
        return self.rl.router_replay and self.stage_record.can_replay_routing

    @property
    def plays_episodes(self) -> bool:
        """True where an engine of the run plays episodes, to learn or to evaluate."""
        return self.eval_success or self.stage_record.has_engine(self)

    def is_over(self, step: int, evaluation: Mapping[str, Any]) -> bool:
        """Tells whether a run with this last evaluation ends after these steps."""
        return step >= self.num_steps or self.has_reached(evaluation)

    def has_reached(self, evaluation: Mapping[str, Any]) -> bool:
        """Tells whether an evaluation ends the run by stop_metric and stop_at."""
        value = evaluation.get(self.stop_metric)
        metric = stages.METRICS.get(self.stop_metric)
        if value is None or metric is None:
            return False
        return metric.is_reached(value, self.stop_at)

    def _init_rules(self) -> list[tuple[bool, str]]:
        """Returns the rule that init_from_changes names fields of the model."""
        return [
            (
                name in ModelConfig.__dataclass_fields__,
                f"init_from_changes must name fields of model, got {name!r}.",
            )
            for name in self.init_from_changes
        ]

    def _watching_rules(self) -> list[tuple[bool, str]]:
        """Returns rules: trackers are known, and the steps of a profile are."""
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
        """Returns rules: a kept checkpoint must be written, and evaluated before."""
        saves, keeps = self.checkpoint_every, self.checkpoints_keep_every
        evaluates = self.eval_every
        return [
            (
                self.host_copy_every <= 0 or saves > 0,
                "host_copy_every needs checkpoint_every: copies count after a save.",
            ),
            (
                keeps <= 0 or (saves > 0 and keeps % saves == 0),
                f"checkpoints_keep_every must be a multiple of checkpoint_every, or 0, "
                f"got {keeps} and {saves}: only those steps are saved.",
            ),
            (
                self.checkpoints_keep_best <= 0
                or (saves > 0 and evaluates > 0 and saves % evaluates == 0),
                f"checkpoints_keep_best needs an evaluation of each saved step: "
                f"checkpoint_every must be a multiple of eval_every, got {saves} and "
                f"{evaluates}.",
            ),
        ]

    def _stop_rules(self) -> list[tuple[bool, str]]:
        """Returns rules: the warm-up ends before the run; stop_metric is evaluated."""
        stage, metric = self.stage_record, stages.METRICS.get(self.stop_metric)
        num_tokens = self.data.batches.tokens_before(self.num_steps)
        is_success = metric is stages.SUCCESS
        is_measured = metric in stage.measures or (is_success and self.eval_success)
        plays = _named([s for s in stages.STAGES if stages.SUCCESS in s.measures])
        can = _named([s for s in stages.STAGES if s.can_measure_success])
        return [
            (
                self.optim.warmup_steps < self.num_updates,
                f"optim.warmup_steps must be smaller than num_steps, got "
                f"{self.optim.warmup_steps} of {self.num_updates} updates; lower it.",
            ),
            (
                self.optim.warmup_tokens < num_tokens,
                f"optim.warmup_tokens must be smaller than the tokens of the run, got "
                f"{self.optim.warmup_tokens:g} of {num_tokens:g} in {self.num_steps} "
                f"steps; shorten the warm-up or raise num_steps.",
            ),
            *(
                (
                    not (value := operator.attrgetter(name)(self))
                    or stage.has_batch_size,
                    f"{name} counts the tokens of texts and is not for stage "
                    f"{self.stage!r}, got {value}; leave it out.",
                )
                for name in BY_TOKENS
            ),
            (
                not self.eval_success or stage.can_measure_success,
                f"eval_success is for stage {can}, got stage {self.stage!r}; stage "
                f"{plays} measures success anyway.",
            ),
            (
                not self.stop_metric or self.eval_every > 0,
                f"stop_metric {self.stop_metric!r} needs evaluations: set eval_every.",
            ),
            (
                is_measured or not is_success,
                f"stop_metric 'eval/success' needs stage {plays}, or stage {can} with "
                f"eval_success=true and the task in rl.environment.",
            ),
            (
                is_measured or metric is None or is_success,
                f"stage {self.stage!r} has no {self.stop_metric}; set "
                f"stop_metric={stage.best.name!r}.",
            ),
            (
                metric is None or 0 < self.stop_at <= metric.most,
                f"stop_at must lie in 0..1 for eval/success and be > 0 for "
                f"eval/bits_per_byte, got {self.stop_at}.",
            ),
        ]

    def batch_rules(self, num_shares: int) -> list[tuple[bool, str]]:
        """Returns the rules that devices of data * fsdp * expert get equal rows."""
        warmup = [
            checks.divisible(
                "each of data.batch_warmup_sizes",
                size,
                "data * fsdp * expert * accumulation_steps * size / batch_size",
                num_shares * self.num_parts(size),
                "give devices to mesh.tensor or mesh.context",
            )
            for size in self.data.batch_warmup_sizes
        ]
        return [self._batch_rule(num_shares), *warmup]

    def _batch_rule(self, num_shares: int) -> tuple[bool, str]:
        """Returns the rule of the rows of a whole batch."""
        parts, updates = self.optim.accumulation_steps, self.updates_per_step
        axes = "data * fsdp * expert" + " * accumulation_steps" * (parts > 1)
        field = self.stage_record.updates.rpartition(".")[2]
        return checks.divisible(
            " * ".join(self.stage_record.rows_of(self)),
            self.num_rows,
            axes + f" * {field}" * (updates > 1),
            num_shares * parts * updates,
            "give devices to mesh.tensor or mesh.context",
        )

    def _mesh_rules(self) -> list[tuple[bool, str]]:
        """Returns the rules that mesh axes divide the rows, tokens, and slots."""
        mesh = self.mesh
        shares = mesh.fsdp * mesh.expert * max(mesh.data, 1)
        known = shares * mesh.context * mesh.tensor  # with data=-1 there are more
        length, chunks = self.data.sequence_length, self.model.expert_chunks
        tokens = mesh.token_rules(length, chunks, known)
        rules = [*self.batch_rules(shares), *tokens]
        if self.plays_episodes:
            axes, parts = "data * fsdp * expert * context", shares * mesh.context
            remedy = "give devices to mesh.tensor"
            rules += [checks.divisible("rl.slots", self.rl.slots, axes, parts, remedy)]
        mtp = self.loss.mtp_objective
        alone = {
            "model.layer_types with gated delta nets, whose states run through the "
            "tokens of a row in order": self.model.is_recurrent,
            f"loss.mtp_objective={mtp!r}, which compares states of neighbouring "
            f"tokens": mtp != "cross_entropy",
            "rl.objective='gspo', whose ratio is that of a whole row": (
                self.rl.objective == "gspo"
            ),
        }
        rules += [
            (
                mesh.context == 1 or not is_so,
                f"mesh.context must be 1 for {what}, got {mesh.context}; give the "
                f"devices to mesh.fsdp or mesh.tensor.",
            )
            for what, is_so in alone.items()
        ]
        return [*rules, *mesh.model_rules(self.model)]


def _named(found: list[stages.Stage]) -> str:
    """Returns the names of stages as a message gives them: "'sft' or 'rl'"."""
    return " or ".join(repr(stage.name) for stage in found)
