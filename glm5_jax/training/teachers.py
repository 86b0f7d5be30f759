"""The policies of earlier stages that stage distill learns from: their log-probs.

Their weights stay beside those that learn, as a reference's do (reference.py).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from glm5_jax import config as config_lib
from glm5_jax.training import pinned, policy, program, reference
from glm5_jax.training.reference import Batch


def require(config: config_lib.TrainConfig, steps: pinned.Steps) -> None:
    """Checks the folders of all teachers without reading weights.

    Args:
      config: of the run.
      steps: that the run reads of other runs; of others the newest is checked.

    Raises:
      InputError: nothing usable is in one, or its model computes differently.
    """
    for folder in config.teachers:
        reference.require_policy(config, folder, "rl.teachers", steps)


def make(
    config: config_lib.TrainConfig, prepared: program.Program, steps: pinned.Steps
) -> Callable[[Batch], Batch]:
    """Returns what fills teacher_logprobs of a batch on the devices.

    Of several teachers each reads all rows, and a token has the log-prob of its own.

    Args:
      config: of the run.
      prepared: its program.
      steps: that the run reads of other runs.

    Raises:
      InputError: there are no usable weights in a folder.
    """
    if not config.teachers:
        return reference.unchanged
    require(config, steps)
    logprobs = reference.scorer(config, prepared)
    places = [pinned.path(steps, folder) for folder in config.teachers]
    weights = [reference.read(config, place, prepared) for place in places]
    place = program.batch_place(prepared.mesh)
    chosen = jax.jit(jnp.where, out_shardings=place)

    def filled(batch: Batch) -> Batch:
        found = logprobs(weights[0], batch)
        for number, params in enumerate(weights[1:], 1):
            is_own = batch[policy.TAUGHT_BY] == number
            found = chosen(is_own, logprobs(params, batch), found)
        return {**batch, policy.TEACHER: found}

    return filled
