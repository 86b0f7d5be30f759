"""Compiles the programs of steps.py and rounds.py, as model/invariance.py requires.

The programs take the state, whose buffers are donated, and return it.
"""

import functools

from glm5_jax.inference import rounds, steps
from glm5_jax.model import invariance

_compiled = functools.partial(invariance.jit, donate_argnames="state")

prefill = _compiled(
    steps.prefill, static_argnames=("config", "is_fresh", "with_experts")
)
decode = _compiled(
    steps.decode, static_argnames=("config", "num_steps", "with_experts")
)
speculate = _compiled(
    rounds.decode, static_argnames=("config", "settings", "with_experts")
)
