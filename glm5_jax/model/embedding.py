"""Looks up the embeddings of ids; several devices may share the table's words."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm5_jax import collectives
from glm5_jax import config as config_lib


def embed(
    table: Float[Array, "v d"],
    config: config_lib.ModelConfig,
    tokens: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """Looks up rows of the table [V, D], of which a device may hold a part.

    Devices that share the vocabulary look up each other's tokens in their own parts,
    and sum the results in the activations' dtype.
    """
    table = collectives.fetched(table, ("V", "D"), config.dtype)
    table = table.astype(jnp.float32)  # gradients of frequent words sum in float32
    if collectives.size(collectives.WORDS) == 1:
        return table[tokens].astype(config.dtype)
    ids = collectives.gather(tokens, collectives.WORD_ROWS, 0)
    ids = ids - collectives.index(collectives.WORDS) * len(table)
    is_here = (ids >= 0) & (ids < len(table))
    x = table[jnp.where(is_here, ids, 0)].astype(config.dtype)
    x = jnp.where(is_here[..., None], x, 0)
    x = collectives.scatter_sum(x, collectives.WORD_ROWS, 0)
    return collectives.total(x, collectives.SHARES)
