"""RL whose episodes are played while the model learns (arXiv 2602.15763, section 4.1).

Its rollouts have older weights than the step that learns from them, so every token
comes with its staleness. The paper's objective for it is rl.objective='dis'.
"""

import dataclasses

from glm5_jax.config.stages import record, rl


def _rules(config: record.Config) -> list[record.Rule]:
    """Returns the rules of episodes, and of the weights that servers take."""
    weights = config.rl.rollout_weights
    return [
        *rl.episode_rules(config),
        *rl.reward_rules(config),
        (
            not config.rl.has_servers or weights == "same",
            f"rl.rollout_weights must be 'same' where servers sample, got {weights!r}: "
            f"they take weights that are not quantized. Set rl.num_engines=0 without "
            f"rl.servers, or rl.rollout_weights='same'.",
        ),
        (
            not config.rl.evaluates_beside
            or not (config.stop_metric or config.checkpoints_keep_best),
            "rl.evaluates_beside must be false with stop_metric or "
            "checkpoints_keep_best, got true: they need the figures of a step before "
            "the next one.",
        ),
    ]


STAGE = dataclasses.replace(
    rl.STAGE,
    name="async_rl",
    feed="stream",
    integers=(*rl.STAGE.integers, "staleness"),
    rules=_rules,
)
