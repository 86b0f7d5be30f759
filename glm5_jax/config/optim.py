"""Settings of the training loss and of the optimizer."""

import dataclasses
from typing import Literal

from glm5_jax.config import batches, checks
from glm5_jax.config.model import Dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the terms of the training loss."""

    # Weight of multi-token prediction, on the mean over its steps (GLM-4.5 report).
    mtp_weight: float = 0.3
    # What multi-token prediction minimises: the cross entropy of the targets; or, for a
    # module that drafts, the share of drafts that the main model rejects, by step
    # (total_variation) or with all steps before (end_to_end; Bebop, arXiv 2606.12370).
    mtp_objective: Literal["cross_entropy", "total_variation", "end_to_end"] = (
        "cross_entropy"
    )
    # Later values of mtp_weight, each with the tokens of the run after which it holds:
    # GLM-4.5 has ((15e12, 0.1),).
    mtp_weight_changes: tuple[tuple[float, ...], ...] = ()
    # Weight of each layer's balance of experts within a sequence (GLM-4.5 report).
    balance_weight: float = 1e-4
    # Weight of the indexer's KL divergence; Megatron-Bridge's default.
    indexer_weight: float = 1e-3
    z_weight: float = 0.0  # weight of the logits' squared log-sum-exp (PaLM); 0: off
    # Step of the router's bias, which balances without a loss (GLM-4.5 report).
    router_bias_rate: float = 1e-3
    # Later values of router_bias_rate, as in mtp_weight_changes: GLM-4.5 has
    # ((15e12, 0.0),).
    router_bias_rate_changes: tuple[tuple[float, ...], ...] = ()
    # Tokens whose float32 logits exist at once; a smaller number saves memory.
    chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        """Checks every field."""
        weights = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.type is float
        }
        checks.require(
            *checks.choices(self),
            *checks.positive(self, "chunk_tokens"),
            *(
                (v >= 0, f"{k} must not be negative, got {v}.")
                for k, v in weights.items()
            ),
            *(
                batches.changes_rule(name, getattr(self, name))
                for name in ("mtp_weight_changes", "router_bias_rate_changes")
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Muon Split on matrices, AdamW on the rest (paper appendix A; GLM-4.5 report)."""

    # Optimizer of the matrices; AdamW updates everything else in either case.
    name: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 2e-4  # peak of the schedule, after the warm-up
    end_learning_rate: float = 4e-5  # end of the schedule, at the last step
    # Shape of the schedule between peak and end.
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0  # steps in which the learning rate rises from 0
    warmup_tokens: float = 0.0  # the same in tokens, for batches of texts
    # Share of a weight, times the learning rate, that is subtracted in each step.
    weight_decay: float = 0.1
    # Orthogonalise W_UQ, W_UK and W_UV head by head (Muon Split).
    muon_split: bool = True
    # Orthogonalise the no-rope and the rope part of W_UQ separately, too.
    muon_split_rope: bool = False
    # Orthogonalise the latent and the rope part of W_KVa separately.
    muon_split_kv_a: bool = False
    # Use Muon for the output head too, instead of AdamW as in xtuner.
    muon_lm_head: bool = False
    # Optimizer of the router's matrix; GLM-4.5 and xtuner use Muon.
    router_gate: Literal["muon", "adamw"] = "muon"
    # Momentum of Muon; undisclosed in the paper, so xtuner's value.
    muon_momentum: float = 0.95
    # Use Nesterov's momentum; undisclosed in the paper, so xtuner's value.
    muon_nesterov: bool = True
    muon_update_rms: float = 0.2  # root mean square to which Muon scales its updates
    # Polynomials of the five Newton-Schulz iterations that orthogonalise an update;
    # undisclosed in the paper, so xtuner's choice.
    ns_coefficients: Literal["quintic", "polar_express"] = "polar_express"
    ns_dtype: Dtype = "bfloat16"  # number type of those iterations' products
    adam_learning_rate_scale: float = 1.0  # ratio of AdamW's learning rate to Muon's
    adam_b1: float = 0.9  # decay of AdamW's mean of gradients
    adam_b2: float = 0.95  # decay of AdamW's mean of squared gradients
    adam_eps: float = 1e-8  # added to the root of AdamW's second moment
    # Number type of Muon's momentum and AdamW's first moment: bfloat16 saves 2 bytes a
    # parameter.
    moment_dtype: Dtype = "float32"
    # Keep all moments in the host's memory; an update fetches them leaf by leaf.
    offload_moments: bool = False
    # Parts of a batch that are computed in turn, to save memory for activations.
    accumulation_steps: int = 1
    clip_norm: float = 0.0  # largest norm of the whole gradient; 0: no clipping

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            (
                self.learning_rate > 0,
                f"learning_rate must be > 0: {self.learning_rate}",
            ),
            (
                0 <= self.end_learning_rate <= self.learning_rate,
                f"end_learning_rate must lie in 0..learning_rate "
                f"({self.learning_rate}), got {self.end_learning_rate}.",
            ),
            (self.warmup_steps >= 0, f"warmup_steps is negative: {self.warmup_steps}."),
            (
                self.warmup_tokens >= 0
                and 0 in (self.warmup_tokens, self.warmup_steps),
                f"warmup_tokens must not be negative, and replaces warmup_steps: set "
                f"one of them to 0, got {self.warmup_tokens:g} and "
                f"{self.warmup_steps}.",
            ),
            (self.weight_decay >= 0, f"weight_decay is negative: {self.weight_decay}."),
            (
                0 <= self.muon_momentum < 1,
                f"muon_momentum must lie in [0, 1), got {self.muon_momentum}.",
            ),
            (0 <= self.adam_b1 < 1, f"adam_b1 must lie in [0, 1): {self.adam_b1}."),
            (0 <= self.adam_b2 < 1, f"adam_b2 must lie in [0, 1): {self.adam_b2}."),
            (
                self.clip_norm >= 0,
                f"clip_norm is negative: {self.clip_norm}; 0 is off.",
            ),
            *(
                (getattr(self, k) > 0, f"{k} must be > 0, got {getattr(self, k)}.")
                for k in ("adam_eps", "adam_learning_rate_scale", "muon_update_rms")
            ),
            *checks.positive(self, "accumulation_steps", most=2**20),
        )
