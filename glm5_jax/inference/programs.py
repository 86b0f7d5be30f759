"""The engine's programs, compiled as the model asks: see model/invariance.py.

Those of steps.py, for whoever has no program around them. They take the state and give
it back: its buffers are donated.
"""

import functools

from glm5_jax.inference import steps
from glm5_jax.model import invariance

_compiled = functools.partial(invariance.jit, donate_argnames="state")

prefill = _compiled(
    steps.prefill, static_argnames=("config", "is_fresh", "with_experts")
)
decode = _compiled(
    steps.decode, static_argnames=("config", "num_steps", "with_experts")
)
