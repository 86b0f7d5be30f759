"""Loads folders onto a mesh of all devices, and prints the memory that each took."""

import ctypes
import gc
import json
import math
import pathlib
import sys

import jax
import numpy as np

from glm5_jax.processes import group, together
from glm5_jax.weights import loading

# Of mallopt: from so many bytes on, a freed buffer goes back to the kernel. Else glibc
# keeps it, and it would count.
M_MMAP_THRESHOLD, SMALL = -3, 2**20


def peak_bytes():
    """Returns the largest resident size since the last `forget`."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget():
    """Lets the largest resident size start again from the present one."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def numbered(shape, dtype):
    """Returns an array whose elements are their own numbers, as the folders hold."""
    return np.arange(math.prod(shape), dtype=dtype).reshape(shape)


def main(axis, *folders):
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALL)
    with together.joined(group.find(), 60, 60):
        mesh, _ = loading.mesh_of([(f"mesh.{axis}", str(len(jax.devices())))])
        jax.block_until_ready(jax.device_put(np.zeros(1), jax.local_devices()[0]))
        found = [load(folder, mesh) for folder in folders]
        sys.stdout.write(json.dumps(found) + "\n")


def load(folder, mesh):
    """Returns the bytes that a model took while it was read, and the kept ones."""
    gc.collect()
    forget()
    before = peak_bytes()
    _, params, _ = loading.load_model(folder, mesh=mesh)
    used = peak_bytes() - before
    own = [
        (np.asarray(shard.data), shard.index, name)
        for name, x in jax.tree_util.tree_leaves_with_path(params)
        for shard in x.addressable_shards
    ]
    kept = sum(data.nbytes for data, _, _ in own)
    wholes = jax.tree.map(lambda x: numbered(x.shape, x.dtype), params)
    wholes = dict(jax.tree_util.tree_leaves_with_path(wholes))
    for data, index, name in own:
        np.testing.assert_array_equal(data, wholes[name][index], str(name))
    return {"used": used, "kept": kept}
