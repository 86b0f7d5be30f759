"""TPUs for tests: as mesh_utils sees them, and whether a compiler for them is here."""

import dataclasses
import functools

import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Device:
    """A TPU as mesh_utils sees it."""

    id: int
    coords: tuple[int, ...]
    slice_index: int
    process_index: int = 0
    device_kind: str = "TPU v5"
    platform: str = "tpu"
    core_on_chip: int = 0


def cube(size, num_slices):
    """Slices of size x size x size chips, in the order of jax."""
    ids = np.arange(num_slices * size**3)
    places = np.stack(np.unravel_index(ids, (num_slices, size, size, size)), axis=1)
    return [
        Device(int(i), tuple(map(int, place[:0:-1])), int(place[0]))
        for i, place in zip(ids, places, strict=True)
    ]


def gpu_nodes(count):
    """Nodes of 8 GPUs: jax gives each host a slice_index of its own."""
    kind = {"device_kind": "NVIDIA H200", "platform": "gpu"}
    return [
        Device(i, (i % 8,), i // 8, process_index=i // 8, **kind)
        for i in range(8 * count)
    ]


@functools.cache
def has_libtpu():
    try:
        mesh_lib.topology("v5p:2x2x1")
    except config_lib.InputError:
        return False
    return True
