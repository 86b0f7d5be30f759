"""The inputs of a loss, laid out for the devices that share a batch.

Whatever depends on other tokens of a row (bounds of documents, tokens ahead) is
computed here from whole rows. All later code is a function of the tokens on one device.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from glm5_jax import collectives, losses, sharding
from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import mtp, transformer

Batch = Mapping[str, Array]


class Ahead(NamedTuple):
    """Tokens, targets and weights of each step of MTP."""

    tokens: Int[Array, "k B T"]
    targets: Int[Array, "k B T"]
    weights: Float[Array, "k B T"]


class Inputs(NamedTuple):
    """A batch [B, T, ...], its context, and the inputs of MTP."""

    batch: Batch
    context: context_lib.Context
    ahead: Ahead | None


def make_inputs(
    config: config_lib.ModelConfig, batch: Batch, mtp_steps: int = 0
) -> Inputs:
    """Returns the inputs of whole rows; devices of a row get parts of equal work."""
    segments, ahead = batch["segment_ids"], None
    context = context_lib.make_context(config, segments, batch["positions"])
    if mtp_steps:
        targets, mask = losses.mtp_targets(
            batch["targets"], batch["loss_mask"], segments, mtp_steps
        )
        tokens = mtp.ahead(batch["tokens"], mtp_steps)
        ahead = Ahead(tokens, targets, losses.mean_weights(mask))
        ahead = jax.tree.map(lambda x: collectives.balanced(x, 2), ahead)
    batch, context = jax.tree.map(
        lambda x: collectives.balanced(x, 1), (dict(batch), context)
    )
    return Inputs(batch, context, ahead)


def parts(inputs: Inputs, num_parts: int) -> Inputs:
    """Returns the rows cut into parts, stacked first; a device keeps its own rows."""

    def cut(x: Array, dim: int) -> Array:
        shape = *x.shape[:dim], -1, num_parts, *x.shape[dim + 1 :]
        return jnp.moveaxis(x.reshape(shape), dim + 1, 0)

    def all_cut(tree: Any, dim: int) -> Any:
        return jax.tree.map(lambda x: cut(x, dim), tree)

    batch, context, ahead = inputs
    return Inputs(all_cut(batch, 0), all_cut(context, 0), all_cut(ahead, 1))


def on_shards(
    function: Callable[[dict, Inputs], Any],
    config: config_lib.ModelConfig,
    out_specs: Any = None,
    dims: Any = None,
) -> Callable[[dict, Inputs], Any]:
    """Returns a function that runs `function` on each device's shards.

    Args:
      function: of parameters and inputs.
      config: of the model.
      out_specs: of what it returns; None: it is equal on every device.
      dims: logical dims of the parameters; None: those of the model.
    """
    params = sharding.specs(dims or transformer.param_dims(config))
    rows: Any = sharding.spec(("B", "T"))
    ahead: Any = sharding.spec(("k", "B", "T"))
    return collectives.on_shards(
        function,
        (params, Inputs(rows, rows, ahead)),
        PartitionSpec() if out_specs is None else out_specs,
    )
