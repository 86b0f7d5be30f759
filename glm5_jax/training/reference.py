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
from glm5_jax.training import computed, pinned, policy, program
from glm5_jax.weights import loading

Batch = Mapping[str, Any]
# Arrays of a batch that come from other policies than the one that reads it.
_OF_OTHERS = {"experts", policy.REFERENCE, policy.TEACHER, policy.TAUGHT_BY}


def unchanged(batch: Batch) -> Batch:
    """Returns the batch: the loss has no reference."""
    return batch


def require(config: config_lib.TrainConfig, steps: pinned.Steps) -> None:
    """Checks the reference, if there is one, without reading weights.

    Args:
      config: of the run.
      steps: that the run reads of other runs; of others the newest is checked.

    Raises:
      InputError: nothing usable is there, or its model computes differently.
    """
    if config.reference is not None:
        field = "rl.reference" if config.rl.reference else "init_from"
        require_policy(config, config.reference, field, steps)


def make(
    config: config_lib.TrainConfig, prepared: program.Program, steps: pinned.Steps
) -> Callable[[Batch], Batch]:
    """Returns what fills reference_logprobs of a batch on the devices.

    Each of its tokens goes to the experts that the reference itself chooses.

    Args:
      config: of the run.
      prepared: its program.
      steps: that the run reads of other runs.

    Raises:
      InputError: there are no usable weights at config.reference.
    """
    if config.reference is None:
        return unchanged
    require(config, steps)
    logprobs = scorer(config, prepared)
    params = read(config, pinned.path(steps, config.reference), prepared)
    return lambda batch: {**batch, policy.REFERENCE: logprobs(params, batch)}


def require_policy(
    config: config_lib.TrainConfig, folder: str, field: str, steps: pinned.Steps
) -> None:
    """Checks that a folder has weights of the run's model, without reading any.

    Args:
      config: of the run.
      folder: as the config names it.
      field: of the config, for the message.
      steps: that the run reads of other runs.

    Raises:
      InputError: names the field and says what is wrong.
    """
    place = pinned.path(steps, folder)
    started = dataclasses.replace(config, init_from=place)
    try:
        loading.require_same_mathematics(started)
        loading.require_params(place, config.model)
    except config_lib.InputError as error:
        why = pinned.explanation(steps, folder)
        raise config_lib.InputError(f"{field}: {error}{why}") from error


def read(
    config: config_lib.TrainConfig, folder: str, prepared: program.Program
) -> dict:
    """Returns the weights of a folder as a step computes with them, placed alike."""
    logging.info("Reads the policy %s ...", folder)
    stored = loading.load_params(folder, config.model, prepared.params)
    return jax.jit(computed.weights, static_argnums=1)(stored, config)


def scorer(
    config: config_lib.TrainConfig, prepared: program.Program
) -> Callable[[dict, Batch], jax.Array]:
    """Returns (weights, batch) -> log-probs of its targets, placed as it is."""

    @functools.partial(
        jax.jit,
        out_shardings=program.batch_place(prepared.mesh),  # as the step takes it
        compiler_options=invariance.compiler_options(config.model),
    )
    def logprobs(params: dict, batch: Batch) -> jax.Array:
        num_parts = config.updates_per_step * config.optim.accumulation_steps
        return policy.token_logprobs(params, config, batch, num_parts)

    def own(params: dict, batch: Batch) -> jax.Array:
        texts = {name: x for name, x in batch.items() if name not in _OF_OTHERS}
        return logprobs(params, texts)

    return own
