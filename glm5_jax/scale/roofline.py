"""The least time that a step can take: arithmetic, memory, links, data-centre network.

All work at once, each at its peak: seconds = max(FLOPs / peak, bytes / HBM, ICI, DCN).
A real step takes longer, so its MFU is lower than the roofline's. For nodes of GPUs the
links are NVLink, and the network is that between nodes.
"""

import dataclasses
from collections.abc import Mapping

from jax.sharding import Mesh

from glm5_jax.scale import slice_devices
from glm5_jax.scale.hlo import communication, schedule


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step by resource."""

    seconds: dict[str, float]  # by the names of `slice_devices.Device.resources`
    by_axes: dict[tuple[str, ...], float]  # of the links, mesh axes one by one
    exposed: float = 0.0  # of the links, while nothing is computed or moved

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def total(self) -> float:
        """Seconds of the resource that takes longest."""
        return max(self.seconds.values())

    @property
    def scheduled(self) -> float:
        """Seconds of the products or of HBM, and those that links add to them."""
        products, hbm, *_ = self.seconds.values()
        return max(products, hbm) + self.exposed


def roofline(
    mesh: Mesh,
    flops: float,
    hbm_bytes: float,
    traffic: communication.Traffic,
    num_slices: int = 1,
    beside: Mapping[str, schedule.Work] | None = None,
) -> Roofline:
    """Computes the roofline of one device.

    Collectives over different axes of the torus run side by side, those over the same
    one after another. A collective over several axes uses the links of all. GPUs have
    one way into their node and one out of it, which all collectives share.

    Args:
      mesh: of all devices.
      flops: of a device's products.
      hbm_bytes: that a device reads and writes.
      traffic: its collectives.
      num_slices: among which the first axis is split.
      beside: the schedule's work between the start and the end of collectives, by name.
        Those that are not named there expose all of their seconds on links.
    """
    device = slice_devices.of_mesh(mesh)
    links: dict[int, float] = {}
    by_axes: dict[tuple[str, ...], float] = {}
    dcn = exposed = 0.0
    for c in traffic.collectives:
        if c.axes == (communication.DCN,):
            seconds = c.wire_bytes / device.dcn
            dcn += seconds
        elif device.is_gpu:
            within, between = _through_switches(mesh, c, device, num_slices)
            links[0] = links.get(0, 0.0) + within
            dcn += between
            seconds = max(within, between)
        else:
            seconds, torus = _on_torus(mesh, c, device.link, num_slices)
            for axis in torus:
                links[axis] = links.get(axis, 0.0) + seconds
        by_axes[c.axes] = by_axes.get(c.axes, 0.0) + seconds
        if c.axes != (communication.DCN,):
            work = (beside or {}).get(c.name, schedule.Work())
            hidden = max(work.flops / device.flops, work.hbm_bytes / device.hbm)
            exposed += max(seconds - hidden * c.count, 0.0)
    seconds_of = (
        flops / device.flops,
        hbm_bytes / device.hbm,
        max(links.values(), default=0.0),
        dcn,
    )
    return Roofline(
        seconds=dict(zip(device.resources, seconds_of, strict=True)),
        by_axes=dict(sorted(by_axes.items(), key=lambda item: -item[1])),
        exposed=exposed,
    )


def _on_torus(
    mesh: Mesh, c: communication.Collective, link: float, num_slices: int
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a collective, and the axes of the torus that it keeps busy."""
    route = slice_devices.route(mesh, c.axes, num_slices)
    ways, hops = route.ways, 1.0
    if c.kind == "collective-permute":
        ways = 1.0
    elif c.kind.endswith("all-to-all"):  # each piece passes all links on its way
        hops = route.hops
    return c.wire_bytes * hops / (link * ways), route.torus


def _through_switches(
    mesh: Mesh,
    c: communication.Collective,
    device: slice_devices.Device,
    num_slices: int,
) -> tuple[float, float]:
    """Seconds of a collective on NVLink, and on the network between nodes.

    Of n devices, p in each of m nodes, with b bytes: a gather brings the b (m - 1) / m
    bytes of other nodes into each node once, over the adapters of its p devices, and
    NVLink hands the b (p - 1) / p bytes of a node's other devices on to each; sums go
    the same way back. An exchange sends b / n bytes to each device directly.
    """
    span = slice_devices.span(mesh, c.axes, num_slices)
    n, m, p = span.num_devices, span.num_nodes, span.of_a_node
    if n == 1:
        return 0.0, 0.0
    if c.kind == "collective-permute":  # some device's partner is in another node
        within, between = (0.0, 1.0) if m > 1 else (1.0, 0.0)
    elif c.kind.endswith("all-to-all"):
        within, between = (p - 1) / (n - 1), (n - p) / (n - 1)
    else:  # a ring of all devices sends (n - 1) / n bytes
        whole = n / (n - 1)
        within, between = whole * (p - 1) / p, whole * (m - 1) / m / p
    wire = c.wire_bytes
    return wire * within / device.links, wire * between / device.dcn
