"""On-policy distillation from policies of earlier stages (arXiv 2602.15763, 3.5).

The last stage: the policy plays, and each of its tokens has the advantage
log pi_teacher - log pi_policy, so that the loss falls along the gradient of
KL(policy || teacher). Rewards are measured and teach nothing.
"""

import dataclasses

from glm5_jax.config.stages import record, rl


def _rules(config: record.Config) -> list[record.Rule]:
    """Returns the rules of episodes of the own engine, and that each has a teacher."""
    number, num_parts = len(config.rl.teachers), config.rl.num_parts
    return [
        *rl.episode_rules(config),
        *rl.own_engine_rules(config),
        (
            number in (1, num_parts),
            f"rl.teachers must name one folder, or one for each of the {num_parts} "
            f"parts of rl.environment={config.rl.environment!r}, got {number}.",
        ),
    ]


STAGE = dataclasses.replace(rl.STAGE, name="distill", has_teachers=True, rules=_rules)
