"""What a user asks for beside the config: tasks, engine, push, and the simulation."""

import dataclasses

from glm5_jax.scale.rl import tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The values of the flags in flags.py, whose texts say what they are."""

    mixture: tasks.Mixture
    engine: str | None = None
    engine_tensor: int | None = None
    engine_weights: str = "bfloat16"
    engine_report: str | None = None
    push: str = "full"
    num_steps: int = 12
