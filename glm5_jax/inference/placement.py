"""Shards the engine's arrays over a mesh: each device has slots of its own.

Parameters are sharded as in training, so that weights pass from trainer to engine
without moving. A slot's cache lies on one device, or on the devices of its tensor axis,
which share heads and widths: each has the states of its own heads, and all other
entries. Devices of the context axis hold more slots: no sequence is cut.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from glm5_jax import collectives
from glm5_jax import config as config_lib
from glm5_jax.config import checks
from glm5_jax.model import cache as cache_lib
from glm5_jax.model import transformer
from glm5_jax.quantization import shards

AnyMesh = Mesh | AbstractMesh
ROWS: Any = PartitionSpec(collectives.ROWS)
LAYERS_OF_ROWS: Any = PartitionSpec(None, collectives.ROWS)
_ROWS_BY_HEAD: Any = PartitionSpec(None, collectives.ROWS, None, collectives.SHARES)
_STATES: Any = PartitionSpec(None, collectives.ROWS, collectives.SHARES)
_STACKED = "cache.entries."  # prefix of leaves whose first dim is the layers


def in_use() -> AnyMesh | None:
    """Returns the mesh of `jax.set_mesh` as an engine uses it; None for one device."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.size <= 1 else engine_mesh(mesh)


def engine_mesh(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with its context axis merged into the fsdp axis.

    In training, parameters are cut over both axes, so they stay where they are.
    """
    names = mesh.axis_names
    merged = mesh.shape["fsdp"] * mesh.shape["context"]
    sizes = {**mesh.shape, "fsdp": merged, "context": 1}
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(
            tuple(sizes.values()),
            names,
            mesh.axis_types,
            abstract_device=mesh.abstract_device,
        )
    fsdp, context = names.index("fsdp"), names.index("context")
    devices = np.moveaxis(mesh.devices, context, fsdp + 1)
    devices = devices.reshape([sizes[name] for name in names])
    return Mesh(devices, names, axis_types=mesh.axis_types)


def using(mesh: AnyMesh | None) -> AbstractContextManager:
    """Sets a mesh, concrete or abstract, as the current one; None changes nothing."""
    if mesh is None:
        return contextlib.nullcontext()
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    return jax.set_mesh(mesh)


def num_shares(mesh: AnyMesh | None) -> int:
    """Returns the number of devices with different slots."""
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in collectives.ROWS)


def least_slots(num_sequences: int) -> int:
    """Returns slots for all sequences at once, 2^n on each device in use."""
    num_devices = num_shares(in_use())
    return num_devices << (-(-num_sequences // num_devices) - 1).bit_length()


def require_whole(name: str, num_slots: int, mesh: AnyMesh | None) -> None:
    """Checks that all devices have equally many slots.

    Raises:
      InputError: the slots cannot be divided so.
    """
    axes, remedy = "data * fsdp * expert * context", "give devices to mesh.tensor"
    checks.require(checks.divisible(name, num_slots, axes, num_shares(mesh), remedy))


def params(tree: dict, config: config_lib.ModelConfig, mesh: AnyMesh) -> dict:
    """Returns a sharding for every parameter of a tree, as in training."""
    return shards.shardings(tree, transformer.param_dims(config), mesh)


def rows(tree: Any, mesh: AnyMesh | None) -> Any:
    """Puts arrays of rows on the devices of their slots."""
    if mesh is None:
        return tree
    place = _sharding(mesh, ROWS)
    if place.is_fully_addressable:
        return jax.device_put(tree, place)

    def own(x: Any) -> jax.Array:  # device_put would compare it among the processes
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            numbers = own(jax.random.key_data(x))
            return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, place, lambda i: host[i])

    return jax.tree.map(own, tree)


def fetched(tree: Any) -> Any:
    """Returns whole arrays on the host, in every process; all must call it."""
    places = [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if all(place.is_fully_addressable for place in places):
        return jax.device_get(tree)
    first = places[0]
    assert isinstance(first, NamedSharding)
    assert isinstance(first.mesh, Mesh)
    return jax.device_get(_copied(first.mesh)(tree))


@functools.cache
def _copied(mesh: Mesh) -> Callable[[Any], Any]:
    """Returns a program that gives every device a copy of whole arrays."""
    return jax.jit(
        lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec())
    )


def shapes(
    make: Callable[[], Any], mesh: AnyMesh
) -> tuple[dict[str, jax.ShapeDtypeStruct], Callable[[dict], Any]]:
    """Returns shapes and shardings of `make`'s leaves by name, and their tree."""
    structures = []

    def leaves() -> dict[str, Any]:
        tree = make()
        structures.append((jax.tree.structure(tree), [*named(tree)]))
        return named(tree)

    placed = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=_sharding(mesh, spec(name))
        )
        for name, x in jax.eval_shape(leaves).items()
    }
    structure, names = structures[0]
    return placed, lambda arrays: structure.unflatten([arrays[n] for n in names])


def made(make: Callable[[], Any], mesh: AnyMesh | None) -> Any:
    """Returns what `make` returns, with each device making its shard."""
    if mesh is None:
        return make()
    leaves, joined = shapes(make, mesh)
    places = {name: x.sharding for name, x in leaves.items()}
    return joined(jax.jit(lambda: named(make()), out_shardings=places)())


def on_shards(
    function: Callable[..., tuple[Any, Any]], config: config_lib.ModelConfig, out: Any
) -> Callable[..., tuple[Any, Any]]:
    """Runs (params, state, ...) -> (state, others) on each device's shards.

    Args:
      function: of parameters, and of trees that are sharded as `spec` says.
      config: of the model.
      out: specs of the outputs besides the state.
    """
    dims = transformer.param_dims(config)

    def run(params: dict, *trees: Any) -> tuple[Any, Any]:
        # Type-checked dataclasses cannot hold specs, dicts can.
        structures = [jax.tree.structure(tree) for tree in trees]
        specs = [{name: spec(name) for name in named(tree)} for tree in trees]

        def local(params: dict, *leaves: dict) -> tuple[dict, Any]:
            mine = zip(structures, trees, leaves, strict=True)
            joined = [s.unflatten([x[n] for n in named(t)]) for s, t, x in mine]
            state, others = function(params, *joined)
            return named(state), others

        is_alone = jax.sharding.get_abstract_mesh().size <= 1
        # A single device may have its layers unstacked, and needs no specs.
        weights = None if is_alone else shards.specs(params, dims)
        mapped = collectives.on_shards(local, (weights, *specs), (specs[0], out))
        state, others = mapped(params, *map(named, trees))
        return structures[0].unflatten([state[n] for n in named(trees[0])]), others

    return run


def spec(name: str) -> PartitionSpec:
    """Returns the spec of a leaf of `named`."""
    if name.removeprefix(_STACKED) in cache_lib.ROWS_BY_HEAD:
        return _ROWS_BY_HEAD
    if name.removeprefix(_STACKED) in cache_lib.STATES:
        return _STATES
    return LAYERS_OF_ROWS if name.startswith(_STACKED) else ROWS


def named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by path, e.g. "cache.entries.kv"."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat)
    return {name: x for name, (_, x) in zip(names, flat, strict=True)}


def _sharding(mesh: AnyMesh, spec: PartitionSpec) -> NamedSharding:
    """Returns a sharding without axes of size one, as jit describes its outputs.

    Otherwise a state that a program returned would count as new and be recompiled for.
    """
    parts = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
    dims = [
        tuple(axis for axis in axes if mesh.shape[axis] > 1) or None for axes in parts
    ]
    return NamedSharding(mesh, PartitionSpec(*(dims if any(dims) else ())))
