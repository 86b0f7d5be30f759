"""Chips that the kernels are written for, and the ceilings that they are held against.

The rates are what a large product and a large copy reach, not the data sheet's: H200
measured, TPUs computed from the published peaks. One entry is one device as jax counts
them: a tpu7x chip is two.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device."""

    name: str
    platform: str  # "tpu" or "gpu"
    device_kind: str  # as jax names it
    matrix_tflops: float  # bfloat16 products into float32
    memory_tbps: float  # bytes read and written of HBM
    memory_gib: float
    topology: str  # the least that its compiler takes
    # Keys from which gathering listed rows should beat a dense product in training:
    # computed, not timed (docs/design/0004-one-seam-for-kernels.md).
    lists_from: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5p", "tpu", "TPU v5", 459.0, 2.46, 95.0, "v5p:2x2x1", 36864),
        Chip("v6e", "tpu", "TPU v6 lite", 920.0, 1.64, 32.0, "v6e:2x2", 131072),
        Chip("tpu7x", "tpu", "TPU7x", 1155.0, 3.7, 96.0, "tpu7x:2x2x1", 131072),
        Chip("h200", "gpu", "NVIDIA H200", 790.0, 4.3, 139.0, "1x1x1", 16384),
    )
}


def is_hopper(device_kind: str) -> bool:
    """Returns whether a GPU runs what is compiled for compute capability 9.0."""
    return any(name in device_kind for name in ("H100", "H200", "H800", "H20"))


def find(device_kind: str) -> Chip | None:
    """The chip that jax calls so, or None if it is not one of CHIPS."""
    return next((c for c in CHIPS.values() if c.device_kind == device_kind), None)
