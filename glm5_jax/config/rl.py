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

    environment: str = "reverse"  # a name of rl/environments, or "reasoning_gym:NAME"
    prompts_per_step: int = 32  # each answered group_size times
    group_size: int = 32  # rollouts of one prompt
    max_new_tokens: int = 1024  # of a turn
    max_turns: int = 8  # of an episode
    temperature: float = 1.0  # of rollouts and of evaluation
    top_p: float = 1.0  # below 1 the trainer would need to know which ids were kept
    slots: int = 32  # sequences that the engine decodes at once
    prefill_chunk: int = 256  # tokens of a prompt that are read at once
    objective: Objective = "icepop"
    pop_beta: float = 2.0  # a token counts where 1/beta <= pi_train/pi_infer <= beta
    clip_low: float = 0.2
    clip_high: float = 0.28
    dis_low: float = DIS_REASONING[0]  # or of DIS_AGENTIC
    dis_high: float = DIS_REASONING[1]
    tis_cap: float = 2.0  # largest weight of truncated importance sampling
    advantage_std: AdvantageStd = "sample"
    loss_mean: LossMean = "sequence"
    updates_per_rollout: int = 1  # a step's samples are cut into as many batches
    dynamic_sampling: bool = False  # groups of equal rewards are replaced by others
    max_rounds: int = 4  # of rollouts in a step, with dynamic sampling
    router_replay: bool = False  # the trainer routes as the engine did
    rollout_weights: RolloutWeights = "same"
    max_logprob_gap: float = 0.05  # mean |log pi_train / pi_infer| that stops a run
    step_timeout_seconds: float = 60.0  # of a call of the environment
    num_eval_tasks: int = 128  # held-out tasks, each answered once

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
                self.num_rows % self.updates_per_rollout == 0,
                f"updates_per_rollout must divide prompts_per_step * group_size = "
                f"{self.num_rows}, got {self.updates_per_rollout}.",
            ),
        )

    @property
    def num_rows(self) -> int:
        """Rows of a batch: one for each rollout."""
        return self.prompts_per_step * self.group_size
