"""The schedules of a run: of the learning rate, and of values that change once.

They count the steps of a run, skipped updates included; where batches have different
sizes, they count tokens.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from glm5_jax import config as config_lib
from glm5_jax.config import batches as batches_lib

Step = Int[Array, ""] | int


def learning_rate(
    config: config_lib.OptimConfig,
    num_steps: int,
    batches: batches_lib.Batches | None = None,
) -> optax.Schedule:
    """Returns a schedule: linear warm-up to the peak, then cosine, linear or constant.

    With w = warmup_steps and x = (step - w) / (num_steps - w) the decay is
    end + (peak - end) * (1 + cos(pi x)) / 2, or peak + (end - peak) * x, or the peak.
    Where batches grow, or warmup_tokens is set, the unit is not a step but the tokens
    of the largest batch.

    Args:
        config: peak and end value, shape of the decay and length of the warm-up.
        num_steps: updates of the whole run; the schedule ends at step num_steps.
        batches: sizes of the batches; None: an update counts as a step.
    """
    if batches is None or (batches.is_constant and not config.warmup_tokens):
        return _of_steps(config, config.warmup_steps, num_steps)
    unit = batches.tokens_of_last
    warmup = config.warmup_tokens or batches.tokens_before(config.warmup_steps)
    of_units = _of_steps(config, warmup / unit, batches.tokens_before(num_steps) / unit)
    return lambda step: of_units(_largest_batches(batches, step))


def changing(
    value: float, changes: batches_lib.Changes, batches: batches_lib.Batches
) -> Callable[[Step], Float[Array, ""] | float]:
    """Returns a function from a step to a value that changes after so many tokens.

    Args:
        value: at first.
        changes: pairs of tokens and a later value; the first step that begins with at
            least so many tokens trained on has it.
        batches: sizes of the batches.
    """
    firsts = [(_as_step(batches.steps_for(n)), later) for n, later in changes]

    def at(step: Step) -> Float[Array, ""] | float:
        now: Float[Array, ""] | float = value
        for first, later in firsts:
            now = jnp.where(step >= first, jnp.float32(later), now)
        return now

    return at


def _of_steps(
    config: config_lib.OptimConfig, warmup: Any, num_steps: Any
) -> optax.Schedule:
    """Returns the schedule of `learning_rate` for a count of steps or other units.

    The types of optax ask for whole numbers, which units need not be.
    """
    peak, end = config.learning_rate, config.end_learning_rate
    length = num_steps - warmup
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, length, end / peak),
        "linear": optax.linear_schedule(peak, end, length),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if not warmup:
        return decay
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup), decay], [warmup]
    )


def _as_step(number: int) -> int:
    """Returns a step as int32 holds it; a run never reaches the last one."""
    return min(number, 2**31 - 1)


def _largest_batches(batches: batches_lib.Batches, step: Any) -> Array:
    """Returns the tokens before a step, in units of the largest batch."""
    if batches.is_constant:
        return jnp.asarray(step)
    firsts = [_as_step(first) for first in batches.firsts]
    phases = zip(batches.sizes, firsts, (*firsts[1:], None), strict=True)
    return sum(
        (
            (jnp.clip(step, first, end) - first) * (size / batches.sizes[-1])
            for size, first, end in phases
        ),
        jnp.zeros(()),
    )
