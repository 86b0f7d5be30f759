"""The least time that a step can take: arithmetic, memory, links, data-centre network.

All work at once, each at its peak: seconds = max(FLOPs / peak, bytes / HBM, ICI, DCN).
A real step takes longer, so its MFU is lower than the roofline's.
"""

import dataclasses

from jax.sharding import Mesh

from glm5_jax.scale import slice_devices
from glm5_jax.scale.hlo import communication


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step by resource."""

    seconds: dict[str, float]  # "FLOPs", "HBM", "ICI", "DCN"
    by_axes: dict[tuple[str, ...], float]  # of the links, mesh axes one by one

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def total(self) -> float:
        """Seconds of the resource that takes longest."""
        return max(self.seconds.values())


def roofline(
    mesh: Mesh,
    flops: float,
    hbm_bytes: float,
    traffic: communication.Traffic,
    num_slices: int = 1,
) -> Roofline:
    """Computes the roofline of one device.

    Collectives over different axes of the torus run side by side, those over the same
    one after another. A collective over several axes uses the links of all.
    """
    device = slice_devices.of_mesh(mesh)
    links: dict[int, float] = {}
    by_axes: dict[tuple[str, ...], float] = {}
    dcn = 0.0
    for c in traffic.collectives:
        if c.axes == (communication.DCN,):
            seconds = c.wire_bytes / device.dcn
            dcn += seconds
        else:
            seconds, torus = _on_torus(mesh, c, device.link, num_slices)
            for axis in torus:
                links[axis] = links.get(axis, 0.0) + seconds
        by_axes[c.axes] = by_axes.get(c.axes, 0.0) + seconds
    return Roofline(
        seconds={
            "FLOPs": flops / device.flops,
            "HBM": hbm_bytes / device.hbm,
            "ICI": max(links.values(), default=0.0),
            "DCN": dcn,
        },
        by_axes=dict(sorted(by_axes.items(), key=lambda item: -item[1])),
    )


def _on_torus(
    mesh: Mesh, c: communication.Collective, link: float, num_slices: int
) -> tuple[float, tuple[int, ...]]:
    """Seconds of a collective, and the axes of the torus that it keeps busy."""
    route = slice_devices.route(mesh, c.axes, num_slices)
    ways, hops = route.ways, 1.0
    if c.kind == "collective-permute":
        ways = 1.0
    elif c.kind.endswith("all-to-all"):  # what travels passes a quarter of the ring
        hops = max(route.length / 4, 1.0)
    return c.wire_bytes * hops / (link * ways), route.torus
