"""Settings of reinforcement learning: rollouts, objective and limits."""

import dataclasses
from typing import Literal

from glm5_jax.config import checks
from glm5_jax.config.quantization import RolloutWeights

Objective = Literal["icepop", "grpo", "dis", "tis", "cispo", "gspo"]
AdvantageStd = Literal["sample", "population", "none"]
LossMean = Literal["sequence", "token"]
Quarantine = Literal["pause", "end", "off"]

# (dis_low, dis_high) of "Single-rollout Asynchronous Optimization", GLM-5.2's; GLM-5
# does not disclose its own.
DIS_REASONING = (0.3, 5.0)
DIS_AGENTIC = (0.8, 3.0)
_POSITIVE = (
    *("clip_low", "clip_high", "dis_low", "dis_high", "tis_cap"),
    *("max_logprob_gap", "step_timeout_seconds"),
    *("answer_timeout_seconds", "episode_timeout_seconds"),
    *("critic_learning_rate", "gae_alpha"),
)
_COUNTS = (
    *("prompts_per_step", "group_size", "max_new_tokens", "max_turns"),
    *("slots", "prefill_chunk", "updates_per_rollout"),
    *("num_eval_tasks", "max_rounds", "critic_updates"),
)
MAX_DRAFTS = 7  # of a round of speculative decoding; GLM-5.2 drafts as many


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig:
    """GRPO with IcePop (arXiv 2602.15763, section 3.2), with the paper's values.

    The paper does not disclose, so this project chose: max_new_tokens, temperature,
    updates_per_rollout, advantage_std (the paper says "std") and every limit.
    """

    # Name of a task in environments/, "reasoning_gym:NAME", or "module:Class" of yours.
    environment: str = "reverse"
    # Most episodes under way of each part of a mixture of tasks, in the order of
    # environment, such as a service of its own bears; 0: no bound but that of all.
    # (): no part has one.
    concurrency: tuple[int, ...] = ()
    prompts_per_step: int = 32  # tasks of a step, each answered group_size times
    group_size: int = 32  # answers to one task, whose rewards are compared
    max_new_tokens: int = 1024  # longest turn of the model, in tokens
    max_turns: int = 8  # most turns of an episode
    temperature: float = 1.0  # temperature of sampling, in rollouts and evaluations
    # Sequences that an engine decodes at once; with rl.servers, that all of them do.
    slots: int = 32
    prefill_chunk: int = 256  # tokens of a prompt that the engine reads at once
    # Pages of 64 tokens of the engine's cache, so that a group's prompt is read once.
    # 0: each slot has the rows of a longest episode.
    num_pages: int = 0
    # Loss: GRPO with IcePop (GLM-5), plain GRPO, three that correct for rollouts of
    # older weights (dis, tis, cispo), or ratios of whole sequences (objectives.py).
    objective: Objective = "icepop"
    # Bound of pi_train / pi_infer: tokens outside 1/pop_beta..pop_beta do not count.
    pop_beta: float = 2.0
    # Clips the ratio of new to old probability below 1 - clip_low.
    clip_low: float = 0.2
    clip_high: float = 0.28  # clips the same ratio above 1 + clip_high
    # Objective dis drops tokens of smaller ratios than 1 - dis_low, and cispo gives
    # them this weight; 0.8 for agents.
    dis_low: float = DIS_REASONING[0]
    # The same of larger ratios than 1 + dis_high; 3 for agents.
    dis_high: float = DIS_REASONING[1]
    tis_cap: float = 2.0  # largest weight of truncated importance sampling
    # Standard deviation of a group's rewards that divides its advantages.
    advantage_std: AdvantageStd = "sample"
    # Take advantages from a critic, a second model that learns the value of each token,
    # instead of from groups, so that group_size may be 1 (SAO, arXiv 2607.07508).
    critic: bool = False
    critic_learning_rate: float = 5e-6  # constant learning rate of the critic
    # Updates of the critic in a step, each with all of its rollouts.
    critic_updates: int = 2
    # First steps of a run, in which the critic learns alone and the policy stays.
    critic_warmup_steps: int = 10
    # The critic's advantages have lambda = 1 - 1 / (gae_alpha * the sampled tokens).
    gae_alpha: float = 1.5
    # Discount of a reward for each token sampled before it; undisclosed, so none.
    gae_gamma: float = 1.0
    # Run, step or Hugging Face folders of the policies that stage distill learns from:
    # one, or one for each part of a mixture of tasks, in the order of environment.
    teachers: tuple[str, ...] = ()
    # Weight in the loss of the KL to the reference, in nats a token. GLM-5 has none.
    kl_weight: float = 0.0
    # Run, step or Hugging Face folder of the policy to stay near; None: init_from.
    reference: str | None = None
    # Weight in the loss of the policy's entropy, in nats a token, which rises with it.
    entropy_weight: float = 0.0
    loss_mean: LossMean = "sequence"  # unit of equal weight: a sequence or a token
    # Rows that the episodes of a step are packed into, several in a row; those that do
    # not fit make a second batch of as many rows. 0: a row for each episode.
    rows_per_step: int = 0
    # Updates of a step, each with an equal part of its rollouts.
    updates_per_rollout: int = 1
    # Begin every step without the optimizer's moments, as GLM-5 does whenever engines
    # get new weights (section 4.1), because the problem has changed.
    forgets_moments: bool = False
    # Replace groups whose rewards are all equal by new ones.
    dynamic_sampling: bool = False
    max_rounds: int = 4  # most rounds of rollouts in a step, with dynamic sampling
    # Most versions between the weights that begin a group of episodes and those that
    # learn from it, in stage async_rl; 0: nothing is played while the model learns.
    max_staleness: int = 4
    # Read the text of episodes that are under way again with new weights, in stage
    # async_rl: tokens are then as old as the weights that draw them, and no older.
    clears_cache: bool = False
    # Servers of this machine that sample in stage async_rl, each a process of its own;
    # 0: an engine in the trainer's process.
    num_engines: int = 0
    # URL of a router whose servers somebody else keeps, on other machines too, to
    # sample in stage async_rl: docs/async_rl.md tells how to start them.
    servers: str | None = None
    # Folder that gets the weights of each step, for rl.servers: theirs is the same one,
    # as --weights_root.
    weights_store: str | None = None
    router_replay: bool = False  # make the trainer route tokens as the engine did
    # Train multi-token prediction along, on the sampled tokens: the policy changes, and
    # the module's drafts would get worse. No gradient of it reaches the policy.
    trains_mtp: bool = False
    num_drafts: int = 0  # most tokens that the engine drafts in a round; 0 is off
    # Weights that engines and servers sample with: the trainer's, or these quantized.
    rollout_weights: RolloutWeights = "same"
    # Mean of |log pi_train / pi_infer| above which a run stops.
    max_logprob_gap: float = 0.05
    step_timeout_seconds: float = 60.0  # longest call of the environment
    # Longest answer to a turn in stage async_rl, with the time it waits for a slot.
    answer_timeout_seconds: float = 240.0
    # Longest time of all of an episode's calls of the environment; for an agent that is
    # a program, of the whole episode with its answers.
    episode_timeout_seconds: float = 600.0
    # Held-out tasks of an evaluation, all different, each answered once.
    num_eval_tasks: int = 128
    # Evaluate while the training goes on, in stage async_rl. Newer weights may draw the
    # last tokens of an evaluation, which tells their share; the run's last one waits.
    evaluates_beside: bool = False
    # URL of a router before servers that only evaluate, beside those of rl.servers: all
    # tokens of an evaluation are then of its version.
    eval_servers: str | None = None
    # Lowest held-out success at which a run may start: below it, most groups have no
    # reward. With 0 here and max_start_success=1, nothing is measured.
    min_start_success: float = 0.05
    # Highest held-out success at which a run may start: above it, little is to learn.
    max_start_success: float = 0.8
    # Share of a step's groups that must have rewards that differ, or the step's update
    # is skipped: Adam's update is as large for one group as for all.
    min_used_groups: float = 0.125

    # Where answers that must earn nothing earn the full reward, in stage async_rl: skip
    # that kind of tasks for a while ("pause"), end the run ("end"), or say so ("off").
    quarantine: Quarantine = "pause"
    # Groups of a kind of tasks from one such answer that is played to its environment,
    # without the engine, to the next; 0: none.
    canary_every: int = 8

    # Most GiB of episodes that the run folder keeps, compressed, for other rewards, for
    # a replay and to look at; the oldest steps go first. 0 keeps none.
    episodes_gib: float = 1.0

    def __post_init__(self) -> None:
        """Checks every field."""
        checks.require(
            *checks.choices(self),
            *checks.positive(
                self,
                *_COUNTS,
                most=checks.MAX_SIZE,
            ),
            (
                0 <= self.num_drafts <= MAX_DRAFTS,
                f"num_drafts must lie in 0..{MAX_DRAFTS}, got {self.num_drafts}.",
            ),
            *self._advantage_rules(),
            *(
                (getattr(self, k) >= 0, f"{k} must be >= 0, got {getattr(self, k)}.")
                for k in (
                    *("max_staleness", "num_engines", "num_pages", "episodes_gib"),
                    *("kl_weight", "entropy_weight", "rows_per_step"),
                    *("critic_warmup_steps", "canary_every"),
                )
            ),
            (
                self.temperature > 0,
                f"temperature must be > 0, got {self.temperature}: a greedy choice "
                f"has no log-probability to learn from.",
            ),
            (self.pop_beta >= 1, f"pop_beta must be at least 1, got {self.pop_beta}."),
            *(
                (getattr(self, k) > 0, f"{k} must be > 0, got {getattr(self, k)}.")
                for k in _POSITIVE
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
                f"updates_per_rollout must divide rows_per_step, or without it "
                f"prompts_per_step * group_size, here {self.num_rows}; got "
                f"{self.updates_per_rollout}.",
            ),
            *self._of_servers(),
            self._rule_of_parts(),
            (
                not self.rows_per_step or self.objective != "gspo",
                "rows_per_step must be 0 with objective='gspo', whose ratio is that of "
                "a whole row.",
            ),
        )

    def _of_servers(self) -> tuple[tuple[bool, str], ...]:
        """Returns the checks of the settings that say who samples."""
        servers, store = self.servers, self.weights_store
        return (
            checks.local_rule(store or "", "weights_store"),
            (
                bool(servers) == bool(store),
                f"servers and weights_store must be set together, got {servers!r} "
                f"and {store!r}: servers read new weights from there.",
            ),
            *(
                (
                    not url or url.startswith(("http://", "https://")),
                    f"{name} must be a URL, e.g. http://host:8000, got {url!r}.",
                )
                for name, url in (
                    ("servers", servers),
                    ("eval_servers", self.eval_servers),
                )
            ),
            (
                not self.eval_servers or bool(servers and self.evaluates_beside),
                f"eval_servers must not be set without servers, whose weights_store "
                f"they read, and evaluates_beside=true, got {self.eval_servers!r}.",
            ),
            (
                not servers or self.num_engines == 0,
                f"num_engines must be 0 where servers={servers!r} sample, got "
                f"{self.num_engines}.",
            ),
        )

    def _rule_of_parts(self) -> tuple[bool, str]:
        """Returns the check of the bounds of a mixture's parts."""
        return (
            len(self.concurrency) in (0, self.num_parts)
            and all(n == 0 or n >= self.group_size for n in self.concurrency),
            f"concurrency must have a number for each of the {self.num_parts} parts of "
            f"environment={self.environment!r}, 0 for no bound or at least "
            f"group_size={self.group_size}, as a group begins as a whole; got "
            f"{self.concurrency}.",
        )

    @property
    def has_servers(self) -> bool:
        """True where servers sample, not an engine in the trainer's process."""
        return bool(self.num_engines or self.servers)

    @property
    def compares_groups(self) -> bool:
        """True where a reward teaches by its difference to others of its group."""
        return not (self.critic or self.teachers)

    @property
    def num_parts(self) -> int:
        """Returns the number of tasksets that environment mixes; 1 if it is one."""
        return self.environment.count("+") + 1

    @property
    def num_rows(self) -> int:
        """Returns the rows of a batch: those asked for, or one for each rollout."""
        return self.rows_per_step or self.prompts_per_step * self.group_size

    def _advantage_rules(self) -> list[tuple[bool, str]]:
        """Returns the rules of advantages that groups give, a critic or teachers."""
        return [
            (
                self.group_size > 1 or not self.compares_groups,
                f"group_size must be at least 2 where answers are compared with those "
                f"of their group, got {self.group_size}; or set critic=true.",
            ),
            (
                self.compares_groups or not self.dynamic_sampling,
                "dynamic_sampling must be false with critic=true or teachers, which "
                "teach by groups of equal rewards too.",
            ),
            (
                not (self.critic and self.teachers),
                "critic must be false with teachers, who give the advantages.",
            ),
            (
                0 < self.gae_gamma <= 1,
                f"gae_gamma must lie in (0, 1], got {self.gae_gamma}.",
            ),
        ]
