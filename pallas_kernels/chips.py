"""Rates and sizes of each chip as vendors publish them, and the shares reached.

The kernels' benchmark, the planner and a run's MFU all read this table. An entry is one
device as jax counts devices: a tpu7x chip has two.

Sources, read in November 2026: cloud.google.com/tpu/docs, pages v5e, v5p, v6e and tpu7x
(the last compares three generations); NVIDIA's data sheets of the A100 SXM, L4, H100
SXM, H200 SXM and HGX B200, where rates are those without sparsity. The network of a GPU
is the adapter that NVIDIA's DGX of that generation gives each: 200 Gbit/s with A100,
400 with the later ones.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A device as its vendor publishes it."""

    name: str
    platform: str  # "tpu" or "gpu"
    device_kinds: tuple[str, ...]  # jax's names; compilers without devices use [0]
    cores: int  # TensorCores of a TPU, multiprocessors of a GPU
    bf16_tflops: float  # bfloat16 products summed in float32
    hbm_tbps: float
    hbm_gib: float  # NVIDIA writes GB
    # GB/s of all ICI or NVLink links, else of PCIe, both ways together.
    interconnect_gbps: float
    num_links: int
    network_gbps: float  # GB/s to other slices or nodes, one way

    @property
    def device_kind(self) -> str:
        """Returns the chip's name in a compiler without devices."""
        return self.device_kinds[0]

    @property
    def reachable_tflops(self) -> float:
        """Returns the bfloat16 rate that large products reach."""
        return self.bf16_tflops * _reached(self.name).matrix

    @property
    def reachable_tbps(self) -> float:
        """Returns the rate of large copies, counting bytes read and bytes written."""
        return self.hbm_tbps * _reached(self.name).memory

    @property
    def reachable_link_gbps(self) -> float:
        """Returns the GB/s that large collectives reach on one link, one way."""
        return self.interconnect_gbps / self.num_links / 2 * LINK_SHARE


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            platform="tpu",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            cores=1,
            bf16_tflops=197.0,
            hbm_tbps=0.819,
            hbm_gib=16.0,
            interconnect_gbps=400.0,
            num_links=4,
            network_gbps=3.125,
        ),
        Chip(
            name="v5p",
            platform="tpu",
            device_kinds=("TPU v5", "TPU v5p"),
            cores=2,
            bf16_tflops=459.0,
            hbm_tbps=2.765,
            hbm_gib=95.0,
            interconnect_gbps=1200.0,
            num_links=6,
            network_gbps=6.25,
        ),
        Chip(
            name="v6e",
            platform="tpu",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            cores=1,
            bf16_tflops=918.0,
            hbm_tbps=1.638,
            hbm_gib=32.0,
            interconnect_gbps=800.0,
            num_links=4,
            network_gbps=12.5,
        ),
        Chip(  # half a chip: two devices share its links
            name="tpu7x",
            platform="tpu",
            device_kinds=("TPU7x",),
            cores=1,
            bf16_tflops=1153.5,
            hbm_tbps=3.69,
            hbm_gib=96.0,
            interconnect_gbps=600.0,
            num_links=6,
            network_gbps=6.25,
        ),
        Chip(
            name="a100",
            platform="gpu",
            device_kinds=("NVIDIA A100-SXM4-80GB",),
            cores=108,
            bf16_tflops=312.0,
            hbm_tbps=2.039,
            hbm_gib=80.0,
            interconnect_gbps=600.0,
            num_links=12,
            network_gbps=25.0,
        ),
        Chip(  # has PCIe alone; its host has a network, of 25 Gbit/s in small ones
            name="l4",
            platform="gpu",
            device_kinds=("NVIDIA L4",),
            cores=58,
            bf16_tflops=121.0,
            hbm_tbps=0.3,
            hbm_gib=24.0,
            interconnect_gbps=64.0,
            num_links=1,
            network_gbps=3.125,
        ),
        Chip(
            name="h100",
            platform="gpu",
            device_kinds=("NVIDIA H100 80GB HBM3",),
            cores=132,
            bf16_tflops=989.0,
            hbm_tbps=3.35,
            hbm_gib=80.0,
            interconnect_gbps=900.0,
            num_links=18,
            network_gbps=50.0,
        ),
        Chip(
            name="h200",
            platform="gpu",
            device_kinds=("NVIDIA H200",),
            cores=132,
            bf16_tflops=989.0,
            hbm_tbps=4.8,
            hbm_gib=141.0,
            interconnect_gbps=900.0,
            num_links=18,
            network_gbps=50.0,
        ),
        Chip(
            name="b200",
            platform="gpu",
            device_kinds=("NVIDIA B200",),
            cores=148,
            bf16_tflops=2250.0,
            hbm_tbps=8.0,
            hbm_gib=180.0,
            interconnect_gbps=1800.0,
            num_links=18,
            network_gbps=50.0,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Reached:
    """Shares of the published rates that large programs reach."""

    matrix: float
    memory: float
    source: str


REACHED = {
    "v5p": Reached(1.0, 2.46 / 2.765, "jax, jax/_src/pallas/mosaic/tpu_info.py"),
    "h200": Reached(790 / 989, 4.3 / 4.8, "timed on an H200 SXM, November 2026"),
}
NOBODY_TIMED = Reached(1.0, 1.0, "the published rates")
LINK_SHARE = 0.9  # "How to Scale Your Model" (2025), chapter "TPUs"


def _reached(name: str) -> Reached:
    return REACHED.get(name, NOBODY_TIMED)


def find(device_kind: str) -> Chip | None:
    """Returns the chip of CHIPS with jax's name, or None."""
    return next((c for c in CHIPS.values() if device_kind in c.device_kinds), None)
