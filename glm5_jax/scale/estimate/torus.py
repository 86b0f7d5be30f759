"""The devices of a topology as they would lie: enough to lay a mesh, without them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

from jax.sharding import Mesh

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import slice_devices


@dataclasses.dataclass(frozen=True)
class Device:
    """A TPU or GPU with the attributes that building a mesh reads."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    slice_index: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0


@functools.cache
def devices(topology: str, num_slices: int = 1) -> list[Device]:
    """Lists them as they are numbered: by slices, the first coordinate fastest.

    GPUs are numbered by nodes; a slice of GPUs is a node.
    """
    kind, _, shape = topology.partition(":")
    if kind in mesh_lib.GPUS:
        return list(_of_nodes(topology, num_slices))
    lengths = [*map(int, shape.split("x")), 1][:3]
    cores = mesh_lib.DEVICES_OF_A_CHIP.get(kind, 1)
    ranges = (range(num_slices), *map(range, reversed(lengths)), range(cores))
    name = slice_devices.named(topology).chip.device_kind
    return [
        Device(i, place[3:0:-1], place[-1], place[0], name)
        for i, place in enumerate(itertools.product(*ranges))
    ]


def _of_nodes(topology: str, num_slices: int) -> Iterator[Device]:
    name = slice_devices.named(topology).chip.device_kind
    for i in range(mesh_lib.num_devices(topology, num_slices)):
        node, place = divmod(i, mesh_lib.NODE)
        slice_index = node if num_slices > 1 else 0
        yield Device(i, (place,), 0, slice_index, name, "gpu", process_index=node)


@functools.cache
def mesh(config: config_lib.MeshConfig, topology: str) -> Mesh:
    """The mesh of a config on these devices."""
    return mesh_lib.make_mesh(config, devices(topology, config.slices))
