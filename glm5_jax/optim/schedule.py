"""The learning rate's schedule over a run's updates, skipped ones included."""

import optax

from glm5_jax import config as config_lib


def learning_rate(config: config_lib.OptimConfig, num_steps: int) -> optax.Schedule:
    """Returns a schedule: linear warm-up to the peak, then cosine, linear or constant.

    With w = warmup_steps and x = (step - w) / (num_steps - w) the decay is
    end + (peak - end) * (1 + cos(pi x)) / 2, or peak + (end - peak) * x, or the peak.

    Args:
        config: peak and end value, shape of the decay and length of the warm-up.
        num_steps: updates of the whole run; the schedule ends at step num_steps.
    """
    warmup, peak, end = (
        config.warmup_steps,
        config.learning_rate,
        config.end_learning_rate,
    )
    assert warmup < num_steps, "config.TrainConfig leaves steps for the decay"
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, num_steps - warmup, end / peak),
        "linear": optax.linear_schedule(peak, end, num_steps - warmup),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if not warmup:
        return decay
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup), decay], [warmup]
    )
