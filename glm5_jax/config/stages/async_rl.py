"""RL whose episodes are played while the model learns (arXiv 2602.15763, section 4.1).

Its rollouts have older weights than the step that learns from them, so every token
comes with its staleness. The paper's objective for it is rl.objective='dis'.
"""

import dataclasses

from glm5_jax.config.stages import record, rl


def _rules(config: record.Config) -> list[record.Rule]:
    """Returns the rules of episodes, and of evaluations beside them."""
    return [
        *rl.episode_rules(config),
        *rl.reward_rules(config),
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
