"""What a loss reads of a batch, laid out for the devices that share it.

What looks beyond a token (bounds of documents, tokens ahead) is made of whole rows
here; behind this everything is a function of the tokens that a device has.
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
    """For each step of MTP: the tokens it reads, what it predicts, its weights."""

    tokens: Int[Array, "k B T"]
    targets: Int[Array, "k B T"]
    weights: Float[Array, "k B T"]


class Inputs(NamedTuple):
    """A batch [B, T, ...], its context, and what MTP reads."""

    batch: Batch
    context: context_lib.Context
    ahead: Ahead | None


def make_inputs(
    config: config_lib.ModelConfig, batch: Batch, mtp_steps: int = 0
) -> Inputs:
    """Makes those of whole rows; devices that share a row get parts of equal work."""
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
    """Cuts rows into parts, stacked in front, of which each device has its own."""

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
) -> Callable[[dict, Inputs], Any]:
    """A function of parameters and inputs, run by each device on what it has.

    Without `out_specs` what it returns is the same on every device.
    """
    params = sharding.specs(transformer.param_dims(config))
    rows: Any = sharding.spec(("B", "T"))
    ahead: Any = sharding.spec(("k", "B", "T"))
    return collectives.on_shards(
        function,
        (params, Inputs(rows, rows, ahead)),
        PartitionSpec() if out_specs is None else out_specs,
    )
