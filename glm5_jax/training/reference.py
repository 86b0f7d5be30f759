"""The policy that a run of reinforcement learning stays near: a term of its loss.

Its weights are a second copy, as a step computes with them, beside those that learn.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.model import invariance
from glm5_jax.training import computed, policy, program
from glm5_jax.weights import loading

Batch = Mapping[str, Any]


def unchanged(batch: Batch) -> Batch:
    """Returns the batch: the loss has no reference."""
    return batch


def require(config: config_lib.TrainConfig) -> bool:
    """Checks a reference other than init_from without reading weights.

    Returns:
      Whether there is one.

    Raises:
      InputError: nothing usable is there, or its model computes differently.
    """
    if config.reference is None or config.reference == config.init_from:
        return False
    started = dataclasses.replace(config, init_from=config.reference)
    try:
        loading.require_same_mathematics(started)
        loading.require_params(config.reference, config.model)
    except config_lib.InputError as error:
        raise config_lib.InputError(f"rl.reference: {error}") from error
    return True


def make(
    config: config_lib.TrainConfig, prepared: program.Program
) -> Callable[[Batch], Batch]:
    """Returns what fills reference_logprobs of a batch on the devices.

    Each of its tokens goes to the experts that the reference itself chooses.

    Raises:
      InputError: there are no usable weights at config.reference.
    """
    if config.reference is None:
        return unchanged
    require(config)
    logging.info("Reads the reference %s ...", config.reference)
    stored = loading.load_params(config.reference, config.model, prepared.params)
    params = jax.jit(computed.weights, static_argnums=1)(stored, config)

    @functools.partial(
        jax.jit,
        out_shardings=program.batch_place(prepared.mesh),  # as the step takes it
        compiler_options=invariance.compiler_options(config.model),
    )
    def logprobs(params: dict, batch: Batch) -> jax.Array:
        num_parts = config.updates_per_step * config.optim.accumulation_steps
        return policy.token_logprobs(params, config, batch, num_parts)

    def filled(batch: Batch) -> Batch:
        own = {name: x for name, x in batch.items() if name != "experts"}
        return {**batch, policy.REFERENCE: logprobs(params, own)}

    return filled
