"""RL whose episodes are played while the model learns (arXiv 2602.15763, section 4.1).

Its rollouts have older weights than the step that learns from them, so every token
comes with its staleness. The paper's objective for it is rl.objective='dis'.
"""

import dataclasses

from glm5_jax.config.stages import rl

STAGE = dataclasses.replace(
    rl.STAGE,
    name="async_rl",
    feed="stream",
    integers=(*rl.STAGE.integers, "staleness"),
)
