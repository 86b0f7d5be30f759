"""Orders the rows that go to experts, spreads tokens over them and sums them back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def in_order(
    keys: Int[Array, " M"], num_keys: int
) -> tuple[Int[Array, " M"], Int[Array, " M"]]:
    """Returns the stable order by key, and the new place of each row."""
    order = _argsort(keys, num_keys)
    return order, jnp.zeros_like(order).at[order].set(jnp.arange(order.size))


def _argsort(chosen: Int[Array, " M"], num_experts: int) -> Int[Array, " M"]:
    """Returns the stable order by expert, sorting packed keys if they fit 31 bits."""
    size = chosen.size
    if size * num_experts >= 2**31:
        return jnp.argsort(chosen)
    return jnp.sort(chosen * size + jnp.arange(size)) % size


# Spreading tokens over their rows and summing rows back are each other's transpose.
# Written so, both directions of both are gathers; autodiff would scatter.
@jax.custom_vjp
def spread(
    x: Float[Array, "t D"], source: Int[Array, " M"], position: Int[Array, "t K"]
) -> Float[Array, "M D"]:
    """Returns rows x[source[m]]; position[t] lists the rows of token t."""
    return x.at[source].get(mode="promise_in_bounds")


@jax.custom_vjp
def gather_sum(
    rows: Float[Array, "M D"], source: Int[Array, " M"], position: Int[Array, "t K"]
) -> Float[Array, "t D"]:
    """Sums rows[position[t]] for each token t."""
    return jnp.sum(rows.at[position].get(mode="promise_in_bounds"), axis=1)


spread.defvjp(
    lambda x, *indices: (spread(x, *indices), indices),
    lambda indices, g: (gather_sum(g, *indices), None, None),
)
gather_sum.defvjp(
    lambda rows, *indices: (gather_sum(rows, *indices), indices),
    lambda indices, g: (spread(g, *indices), None, None),
)
