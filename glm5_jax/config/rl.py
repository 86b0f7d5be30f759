"""Reinforcement learning: rollouts, objective, and what stops a run."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks

Objective = Literal["icepop", "grpo", "dis", "tis"]
AdvantageStd = Literal["sample", "population", "none"]
LossMean = Literal["sequence", "token"]
RolloutWeights = Literal["same", "int8"]

# (dis_low, dis_high) of "Single-rollout Asynchronous Optimization", GLM-5.2's; GLM-5
# does not disclose its own.
DIS_REASONING = (0.3, 5.0)
DIS_AGENTIC = (0.8, 3.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig:
    """GRPO with IcePop (arXiv 2602.15763, section 3.2); its values where disclosed.

    Undisclosed there, so chosen here: max_new_tokens, temperature, updates_per_rollout,
    advantage_std (the paper says "std"), every limit.
    """

    # A name of environments/, "reasoning_gym:NAME", or "module:Class" of your own.
    environment: str = "reverse"
    prompts_per_step: int = 32  # tasks of a step, each answered group_size times
    group_size: int = 32  # answers to one task, whose rewards are compared
    max_new_tokens: int = 1024  # longest turn of the model, in tokens
    max_turns: int = 8  # most turns of an episode
    temperature: float = 1.0  # temperature of sampling, in rollouts and in evaluation
    # Must be 1: else the trainer would need to know which ids were kept.
    top_p: float = 1.0
    slots: int = 32  # sequences that the engine decodes at once
    prefill_chunk: int = 256  # tokens of a prompt that the engine reads at once
    # Which loss: GRPO with IcePop (GLM-5), plain GRPO, and two that correct for
    # rollouts of older weights (objectives.py).
    objective: Objective = "icepop"
    pop_beta: float = 2.0  # a token counts where 1/beta <= pi_train/pi_infer <= beta
    # The ratio of new to old probability is clipped below 1 - clip_low.
    clip_low: float = 0.2
    clip_high: float = 0.28  # that ratio is clipped above 1 + clip_high
    # In objective dis smaller ratios do not count; 0.8 for agents.
    dis_low: float = DIS_REASONING[0]
    # In objective dis larger ratios do not count; 3 for agents.
    dis_high: float = DIS_REASONING[1]
    tis_cap: float = 2.0  # largest weight of truncated importance sampling
    # Which standard deviation of a group's rewards divides them.
    advantage_std: AdvantageStd = "sample"
    loss_mean: LossMean = "sequence"  # whether sequences or tokens have equal weight
    # Updates of a step: its samples are cut into as many batches.
    updates_per_rollout: int = 1
    # Replace groups whose rewards are all equal by others.
    dynamic_sampling: bool = False
    max_rounds: int = 4  # most rounds of rollouts in a step, with dynamic sampling
    router_replay: bool = False  # let the trainer route tokens as the engine did
    # Weights that the engine samples with: the trainer's, or rounded to int8.
    rollout_weights: RolloutWeights = "same"
    # A run stops where the mean |log pi_train / pi_infer| is above it.
    max_logprob_gap: float = 0.05
    step_timeout_seconds: float = 60.0  # longest call of the environment
    # Held-out tasks of an evaluation, no two alike, each answered once.
    num_eval_tasks: int = 128
    # Least held-out success that a start must have: below it most groups earn nothing.
    # 0 here and 1 above measure nothing and refuse nothing.
    min_start_success: float = 0.05
    # Largest held-out success that a start may have: above it there is little to learn.
    max_start_success: float = 0.8
    # Share of prompts_per_step: a step in which fewer groups have rewards that differ
    # is left out, for Adam makes as large an update of one group as of all.
    min_used_groups: float = 0.125

    def __post_init__(self) -> None:
        """Checks every field."""
        size, std = self.group_size, self.advantage_std
        checks.require(
            *checks.choices(self),
            *checks.positive(
                self,
                *("prompts_per_step", "group_size", "max_new_tokens", "max_turns"),
                *("slots", "prefill_chunk", "updates_per_rollout", "num_eval_tasks"),
                "max_rounds",
                most=checks.MAX_SIZE,
            ),
            (
                size > 1 or std == "none",
                f"group_size must be at least 2 where advantages are normalised by "
                f"their group, got {size}; or set advantage_std='none'.",
            ),
            (
                self.temperature > 0,
                f"temperature must be > 0, got {self.temperature}: a greedy choice "
                f"has no log-probability to learn from.",
            ),
            (
                self.top_p == 1,
                f"top_p must be 1, got {self.top_p}: the ids that a smaller one keeps "
                f"are not recorded, so the trainer could not recompute the "
                f"probabilities.",
            ),
            (self.pop_beta >= 1, f"pop_beta must be at least 1, got {self.pop_beta}."),
            *(
                (getattr(self, k) > 0, f"{k} must be > 0, got {getattr(self, k)}.")
                for k in ("clip_low", "clip_high", "dis_low", "dis_high", "tis_cap")
            ),
            *(
                (getattr(self, k) > 0, f"{k} must be > 0, got {getattr(self, k)}.")
                for k in ("max_logprob_gap", "step_timeout_seconds")
            ),
            (
                0 <= self.min_start_success <= self.max_start_success <= 1,
                f"min_start_success and max_start_success must lie in 0..1 in this "
                f"order, got {self.min_start_success} and {self.max_start_success}.",
            ),
            (
                0 <= self.min_used_groups <= 1,
                f"min_used_groups must lie in 0..1, got {self.min_used_groups}.",
            ),
            (
                self.num_rows % self.updates_per_rollout == 0,
                f"updates_per_rollout must divide prompts_per_step * group_size = "
                f"{self.num_rows}, got {self.updates_per_rollout}.",
            ),
        )

    @property
    def num_rows(self) -> int:
        """Rows of a batch: one for each rollout."""
        return self.prompts_per_step * self.group_size
