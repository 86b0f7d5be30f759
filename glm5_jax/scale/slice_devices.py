"""A device of a mesh: its memory, its links, and what a mesh axis uses of them.

TPUs of a slice are joined by a torus, of which a mesh axis uses some axes. GPUs of a
node are joined by NVLink through switches, so that each sends to any other at its full
rate; each GPU has a network adapter of its own to other nodes.

Rates come from pallas_kernels/chips.py: what large programs reach where somebody timed
it, else what the vendor publishes. All are of one device as jax counts them: a tpu7x
chip is two devices, which share its links.
"""

import dataclasses
import functools

import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from pallas_kernels import chips

GIB = 2**30
# What nvidia-smi shows of an SXM module, and the share of it that jax may allocate
# (XLA_PYTHON_CLIENT_MEM_FRACTION in launch/slurm.sh): NCCL and cuBLAS need the rest.
DRIVER_GIB = {"h100": 79.65, "h200": 140.4, "b200": 179.06}
GPU_SHARE = 0.92


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of a TPU slice, or of a node of GPUs."""

    chip: chips.Chip
    hbm_limit_gib: float  # the most that the compiler lets a program take
    wraps_at: int = 0  # an axis of the slice is a ring if it is a multiple of this

    @property
    def is_gpu(self) -> bool:
        """Returns whether switches join the devices of a node, not a torus."""
        return self.chip.platform == "gpu"

    @property
    def resources(self) -> tuple[str, str, str, str]:
        """Names what a step takes time of, as `roofline.Roofline` does."""
        links, network = ("NVLink", "network") if self.is_gpu else ("ICI", "DCN")
        return "FLOPs", "HBM", links, network

    @property
    def flops(self) -> float:
        """bfloat16 FLOPs a second."""
        return self.chip.reachable_tflops * 1e12

    @property
    def hbm(self) -> float:
        """Bytes of memory a second."""
        return self.chip.reachable_tbps * 1e12

    @property
    def link(self) -> float:
        """Bytes a second on one link of the torus, one way."""
        return self.chip.reachable_link_gbps * 1e9

    @property
    def links(self) -> float:
        """Bytes a second on all links of a device, one way."""
        return self.link * self.chip.num_links

    @property
    def dcn(self) -> float:
        """Bytes a second of its share of the host's network, one way.

        Of a GPU, what its own adapter has: InfiniBand or Ethernet between nodes.
        """
        return self.chip.network_gbps * 1e9


DEVICES = {
    device.chip.device_kind: device
    for device in (
        Device(chips.CHIPS["v5e"], 15.75, 16),
        Device(chips.CHIPS["v5p"], 95.74, 4),
        Device(chips.CHIPS["v6e"], 31.25, 16),
        Device(chips.CHIPS["tpu7x"], 94.75, 4),
        *(
            Device(chips.CHIPS[name], round(DRIVER_GIB[name] * GPU_SHARE, 2))
            for name in mesh_lib.GPUS
        ),
    )
}


def of_mesh(mesh: Mesh) -> Device:
    """The device that a mesh is made of.

    Raises:
      InputError: it is none of DEVICES.
    """
    kind = mesh.devices.flat[0].device_kind
    if kind not in DEVICES:
        names = ", ".join(device.chip.name for device in DEVICES.values())
        raise config_lib.InputError(
            f"there are no peaks for {kind!r}; give a topology of {names}."
        )
    return DEVICES[kind]


def named(topology: str) -> Device:
    """The device that a topology, such as "v5p:8x8x8", is made of."""
    mesh_lib.num_devices(topology)  # refuses what is none
    chip = topology.partition(":")[0]
    return next(device for device in DEVICES.values() if device.chip.name == chip)


def abstract_mesh(config: config_lib.MeshConfig, topology: str) -> AbstractMesh:
    """The mesh of a topology without its devices: for shapes, and without libtpu.

    Raises:
      InputError: there is no such chip, or the axes do not make up its devices.
    """
    sizes = mesh_lib.axis_sizes(config, mesh_lib.num_devices(topology, config.slices))
    chip = named(topology).chip
    return AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        abstract_device=AbstractDevice(
            chip.device_kind, num_cores=None, platform=chip.platform
        ),
    )


@dataclasses.dataclass(frozen=True)
class Route:
    """The axes of the torus that some mesh axes lie on."""

    torus: tuple[int, ...]
    ways: float  # links that a device sends on at once
    hops: float  # links to another device of the group, in the mean


@functools.lru_cache(maxsize=4096)  # of a large mesh it takes milliseconds
def route(mesh: Mesh, axes: tuple[str, ...], num_slices: int = 1) -> Route:
    """Returns where the devices of one group lie that differ along some axes of a mesh.

    A ring sends both ways, a line one way; two cores of a chip count as one link.
    """
    device = of_mesh(mesh)
    sizes = dict(mesh.shape)
    grid = mesh.devices[: mesh.devices.shape[0] // num_slices]
    index = tuple(slice(None) if axis in axes else 0 for axis in sizes)
    group = np.array([d.coords for d in np.ravel(grid[index])])
    whole = np.array([d.coords for d in grid.flat])
    torus = tuple(int(i) for i in np.flatnonzero(np.ptp(group, axis=0)))
    ways = distance = 0.0
    for i in torus:
        extent, n = int(np.ptp(whole[:, i])) + 1, len(set(group[:, i]))
        is_ring = n == extent and extent % device.wraps_at == 0
        ways += 2 if is_ring else 1
        distance += n / 4 if is_ring else (n * n - 1) / (3 * n)  # to any, itself too
    others = len(group) / max(len(group) - 1, 1)
    return Route(torus, ways or 1.0, distance * others or 1.0)


@dataclasses.dataclass(frozen=True)
class Span:
    """A group of GPUs that some mesh axes join, and the nodes in which they are."""

    num_devices: int
    num_nodes: int

    @property
    def of_a_node(self) -> float:
        """Devices of the group in a node."""
        return self.num_devices / self.num_nodes


@functools.lru_cache(maxsize=4096)
def span(mesh: Mesh, axes: tuple[str, ...], num_slices: int = 1) -> Span:
    """Returns the group of GPUs that differ along some axes of a mesh."""
    grid = mesh.devices[: mesh.devices.shape[0] // num_slices]
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.shape)
    nodes = [device.process_index for device in np.ravel(grid[index])]
    return Span(len(nodes), len(set(nodes)))
