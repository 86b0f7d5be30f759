"""Gives devices the shards of a state that only their replicas have.

Devices along the mesh's data axis hold the same shards. So a host that has lost its
copy gets it from the same place of another replica, by one sum over that axis in which
every other term is zero. Numbers travel as their bits: -0.0 stays what it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PyTree = Any
_AXIS = "data"


def sources(mesh: Mesh, has: list[bool]) -> np.ndarray | None:
    """Chooses one replica of every shard among the processes that have theirs.

    Args:
      mesh: of the state.
      has: of each process, whether it has all of its shards.

    Returns:
      bool [the mesh's shape], True once along the data axis; None if a shard is lost.
    """
    owned = np.vectorize(lambda device: has[device.process_index])(mesh.devices)
    axis = mesh.axis_names.index(_AXIS)
    if not owned.any(axis).all():
        return None
    first = np.expand_dims(owned.argmax(axis), axis)
    chosen = np.zeros_like(owned)
    np.put_along_axis(chosen, first, True, axis)
    return chosen


def spread(state: PyTree, chosen: np.ndarray) -> PyTree:
    """Returns the state with the chosen devices' shards in all replicas.

    Args:
      state: arrays on one mesh, no dim of which is sharded over its data axis; they
        are donated, as memory may not have room for two states.
      chosen: of `sources`.
    """
    mesh: Mesh = jax.tree.leaves(state)[0].sharding.mesh
    everywhere = P(*mesh.axis_names)
    marks = jax.make_array_from_callback(
        chosen.shape, NamedSharding(mesh, everywhere), lambda index: chosen[index]
    )

    def of(x: jax.Array) -> jax.Array:
        place: Any = x.sharding
        spec = place.spec
        taken = jax.shard_map(
            _taken,
            mesh=mesh,
            in_specs=(spec, everywhere),
            out_specs=spec,
            check_vma=False,  # replicas choose alike, each from its own row
        )
        x = jax.device_put(x, place.with_memory_kind("device"))  # some are offloaded
        return jax.device_put(jax.jit(taken, donate_argnums=0)(x, marks), place)

    return jax.tree.map(of, state)


def _taken(x: jax.Array, is_chosen: jax.Array) -> jax.Array:
    """Returns the array of the chosen device along the data axis."""
    if x.dtype == jnp.bool_:
        return _taken(x.astype(jnp.uint8), is_chosen).astype(jnp.bool_)
    narrow = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, narrow).astype(jnp.uint32)
    mine = jnp.where(is_chosen.reshape(()), bits, jnp.uint32(0))
    whole = jax.lax.psum(mine, _AXIS).astype(narrow)
    return jax.lax.bitcast_convert_type(whole, x.dtype)
