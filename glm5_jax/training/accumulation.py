"""Gradients of a batch that goes through the model in equal parts, one after another.

Only one part's activations exist at a time; optim.accumulation_steps is the number of
parts, of which a smaller batch at the beginning of a run has fewer. Loss and gradient
are those of the whole batch, up to rounding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax.model import transformer
from glm5_jax.training import inputs as inputs_lib


def abstract_gradients(config: config_lib.TrainConfig) -> dict:
    """Returns the shapes of the gradients, in the dtypes that the optimizer gets."""
    params = transformer.abstract_params(config.model)
    computed = jax.eval_shape(lambda p: transformer.cast(p, config.model), params)
    if config.optim.accumulation_steps == 1:
        return computed
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), computed)


def value_and_grad(
    local: Callable,
    config: config_lib.TrainConfig,
    params: dict,
    inputs: inputs_lib.Inputs,
    num_parts: int,
    add: Callable | None = None,
    dims: Any = None,
) -> tuple[Any, dict]:
    """Returns (loss, other values) of the whole batch, and the gradient.

    Args:
      local: (params, a device's shard of a part) -> (loss, other values). The loss is
        a sum over rows; all results are equal on every device.
      config: of the run.
      params: in the dtype of the computation.
      inputs: of the whole batch.
      num_parts: a divisor of the rows of every device.
      add: adds the (loss, other values) of two parts, in float32, from zeros; None:
        sums them.
      dims: logical dims of the parameters; None: those of the model.
    """
    add = add or functools.partial(jax.tree.map, jnp.add)
    dims = dims or transformer.param_dims(config.model)
    if num_parts == 1:
        whole = inputs_lib.on_shards(local, config.model, dims=dims)
        return jax.value_and_grad(whole, has_aux=True)(params, inputs)

    def device_share(params: dict, part: inputs_lib.Inputs) -> tuple[Array, Any]:
        # Every device differentiates its own copy of the same loss, and the transposed
        # collectives add up the gradients of all copies: each counts 1 / num_devices.
        loss, others = local(params, part)
        return loss / collectives.num_devices(), (loss, others)

    def one_part(params: dict, part: inputs_lib.Inputs) -> tuple[Any, dict]:
        grads, values = jax.grad(device_share, has_aux=True)(params, part)
        return values, grads

    def all_parts(params: dict, inputs: inputs_lib.Inputs) -> tuple[Any, dict]:
        def add_part(
            total: tuple[Any, dict], part: inputs_lib.Inputs
        ) -> tuple[tuple[Any, dict], None]:
            total_values, total_grads = total
            values, grads = one_part(params, part)
            total_grads = jax.tree.map(jnp.add, total_grads, grads)
            return (add(total_values, values), total_grads), None

        parts = inputs_lib.parts(inputs, num_parts)
        first = jax.tree.map(lambda x: x[0], parts)
        # A gradient has the shapes of the parameters: it is traced once, in the scan.
        shapes = jax.eval_shape(local, params, first), params
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        (values, grads), _ = lax.scan(add_part, zeros, parts)
        # Replicas of a parameter exchange their gradients once, after the last part.
        return values, jax.tree.map(collectives.total_of_copies, grads, dims)

    specs = jax.sharding.PartitionSpec(), sharding.specs(dims)
    whole = inputs_lib.on_shards(all_parts, config.model, specs, dims)
    return whole(params, inputs)
