"""Arranges devices in a mesh with named axes: this machine's, or absent ones.

The name of a TPU topology has the shape of its torus, e.g. "v5p:8x8x8". libtpu compiles
for it without any chip: `pip install 'glm5_jax[aot]'`. Only the data axis spans several
slices, which a data-centre network connects; within a slice the network is a torus.

The name of a GPU topology has its nodes of 8, e.g. "h200:64x8", or "h200:8" for one.
Every axis may span nodes; the last ones stay within one where their sizes permit.
"""

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from glm5_jax import config as config_lib
from glm5_jax.config import checks

AXES = ("data", "fsdp", "expert", "tensor", "context")
# Slices that are sold (cloud.google.com/tpu/docs), smallest first, for suggestions:
# libtpu accepts others too. A tpu7x chip is two devices.
_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16", "16x16x24", "16x24x24"),
)
TOPOLOGIES = {
    "v5e": _SQUARES,
    "v5p": _CUBES,
    "v6e": _SQUARES,
    "tpu7x": (*_CUBES, "16x24x32"),
}
DEVICES_OF_A_CHIP = {"tpu7x": 2}  # every other chip is one device
NODE = 8  # GPUs that NVLink joins on a board
GPUS = ("h100", "h200", "b200")  # that are sold as such nodes
_BLOCK = 4  # chips along each side of the cubes that make up larger slices


# They keep libtpu from looking for chips, from complaining that there are none, and
# from locking out other processes.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def make_mesh(
    config: config_lib.MeshConfig, devices: Sequence[Any] | None = None
) -> Mesh:
    """Returns a mesh of devices, with axis types Auto.

    It places the last axes first, so that expert and tensor get whole axes of the torus
    if its shape permits.

    Args:
      config: sizes of the axes.
      devices: devices of `topology`; default: those that jax finds.

    Raises:
      InputError: the axes' product is not the number of devices, or they are not
        in `slices` slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = list(axis_sizes(config, len(devices)).values())
    _require_slices(config.slices, devices)
    if config.slices == 1:
        grid = _torus(sizes, devices)
    else:
        across = (config.slices, *(1 for _ in AXES[1:]))
        grid = mesh_utils.create_hybrid_device_mesh(
            (sizes[0] // config.slices, *sizes[1:]),
            across,
            devices,
            allow_split_physical_axes=True,
        )
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def topology(name: str, num_slices: int = 1) -> list[Any]:
    """Returns the devices of absent slices, for which programs can be compiled.

    Args:
      name: topology of a slice, e.g. "v5p:8x8x8".
      num_slices: number of slices of that shape.

    Raises:
      InputError: there is no such topology, or no compiler for it.
    """
    kind = require_compiler(name)
    for variable, value in _LIBTPU.items():
        os.environ.setdefault(variable, value)
    if num_slices < 1:
        raise config_lib.InputError(f"slices must be at least 1, got {num_slices}.")
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=name, num_slices=num_slices
        ).devices
    except Exception as error:
        if "INVALID_ARGUMENT" in str(error):
            raise config_lib.InputError(
                f"libtpu knows no topology {name!r}; near it: "
                f"{_near(kind, name.partition(':')[2])}."
            ) from error
        raise config_lib.InputError(
            f"there is no compiler for TPUs here ({error}); "
            f"pip install 'glm5_jax[aot]'."
        ) from error


def num_devices(name: str, num_slices: int = 1) -> int:
    """Returns the number of devices of a topology by its name, without a compiler.

    Raises:
      InputError: there is no such chip, or no slice of such a shape.
    """
    kind = _require_named(name)
    if num_slices > 1 and num_nodes(name) > 1:
        raise config_lib.InputError(
            f"{num_slices} slices of {name!r} cannot be: give {kind}:{NODE} with a "
            f"slice a node, of which only data goes across, or the nodes in the "
            f"topology, e.g. {kind}:{num_slices * num_nodes(name)}x{NODE}, which every "
            "axis may span."
        )
    num_chips = math.prod(map(int, name.partition(":")[2].split("x")))
    return num_chips * DEVICES_OF_A_CHIP.get(kind, 1) * num_slices


def require_compiler(name: str) -> str:
    """Returns the chip of a topology for which programs can be compiled.

    Raises:
      InputError: there is no such topology, or its devices are GPUs.
    """
    kind = _require_named(name)
    if kind in GPUS:
        raise config_lib.InputError(
            f"topology must name a slice of TPUs, got {name!r}: steps are compiled "
            f"ahead of time for {', '.join(TOPOLOGIES)} alone, as reports read what "
            "libtpu schedules. Rank meshes with python -m glm5_jax.plan "
            f"--topology={name}, list the arrays of a program with python -m "
            "glm5_jax.aot --arrays, and ask for the memory of a run on the machine "
            "itself: python -m glm5_jax.train --dry_run."
        )
    return kind


def num_nodes(name: str) -> int:
    """Returns the nodes of a topology of GPUs, or 1 for a slice of TPUs."""
    kind, _, shape = name.partition(":")
    return int(shape.partition("x")[0]) if kind in GPUS and "x" in shape else 1


def axis_sizes(config: config_lib.MeshConfig, num_devices: int) -> dict[str, int]:
    """Returns the devices along each axis; data = -1 takes those that are left.

    Raises:
      InputError: the axes' product is not the number of devices, or data does not go
        across the slices.
    """
    if num_devices % config.slices:
        near = checks.nearest_divisors(num_devices, config.slices)
        raise config_lib.InputError(
            f"mesh.slices must divide the devices, got {config.slices} on "
            f"{num_devices}; set it to {checks.listed(near)}."
        )
    sizes = {axis: getattr(config, axis) for axis in AXES}
    if config.data == -1:
        others = math.prod(sizes[axis] for axis in AXES[1:])
        sizes["data"] = max(num_devices // others, 1)
    if math.prod(sizes.values()) != num_devices:
        axes = " x ".join(f"{a}={s}" for a, s in sizes.items())
        raise config_lib.InputError(
            f"mesh needs as many devices as there are: {axes} on {num_devices} "
            f"devices; set the axes so that their product is {num_devices}, e.g. "
            f"{_fitting(config, num_devices)}."
        )
    if sizes["data"] % config.slices:
        a_slice = num_devices // config.slices
        near = checks.nearest_divisors(a_slice, num_devices // sizes["data"])
        raise config_lib.InputError(
            f"mesh.data must be divisible by mesh.slices: only data goes across "
            f"slices, got data={sizes['data']} on {config.slices} slices; set the "
            f"other axes to {checks.listed(near)} devices in all, a divisor of the "
            f"{a_slice} of a slice."
        )
    return sizes


def _fitting(config: config_lib.MeshConfig, num_devices: int) -> str:
    """Returns changes of one axis that make the product right, nearest sizes first."""
    sizes = {axis: getattr(config, axis) for axis in AXES[1:]}
    others = math.prod(sizes.values())
    if num_devices % others == 0:
        return f"mesh.data={num_devices // others}, or -1"
    choices = []
    for axis, size in sizes.items():
        rest, left_over = divmod(num_devices * size, others)
        if size > 1 and not left_over:
            near = checks.nearest_divisors(rest, size)
            choices.append(f"mesh.{axis}={checks.listed(near)}")
    rule = f"mesh.data=-1 and the others divisors of {num_devices}"
    return f"{rule}: {', '.join(choices)}" if choices else rule


def _torus(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Places the mesh axes on those of the torus, on whole ones if possible."""
    try:
        return mesh_utils.create_device_mesh(sizes, devices)
    except NotImplementedError:  # two mesh axes must share an axis of the torus
        return mesh_utils.create_device_mesh(
            sizes, devices, allow_split_physical_axes=True
        )


def _require_slices(num_slices: int, devices: Sequence[Any]) -> None:
    """Checks the number of slices, of TPUs or, optionally, of GPU hosts.

    jax numbers hosts of GPUs as slices. With slices=1 any axis may span them: devices
    are ordered by host, so that the last axes stay within one.
    """
    found = len({getattr(device, "slice_index", None) for device in devices})
    allowed = {found} if devices[0].platform == "tpu" else {1, found}
    if num_slices not in allowed:
        raise config_lib.InputError(
            f"mesh.slices must be the number of slices, got {num_slices}, but these "
            f"{len(devices)} devices are in {found}; set mesh.slices="
            f"{' or '.join(map(str, sorted(allowed)))}."
        )


def _require_named(name: str) -> str:
    """Returns the chip of a topology's name, or raises InputError."""
    kind, _, shape = name.partition(":")
    if kind in GPUS:
        if not re.fullmatch(rf"([1-9]\d*x)?{NODE}", shape):
            raise config_lib.InputError(
                f"topology {name!r} must give nodes of {NODE} GPUs: {kind}:{NODE} is "
                f"one, {kind}:64x{NODE} are 64."
            )
        return kind
    if kind not in TOPOLOGIES:
        known = ", ".join((*TOPOLOGIES, *GPUS))
        raise config_lib.InputError(
            f"topology must be CHIP:SHAPE with a chip of {known}, got {name!r}; e.g. "
            f"v5p:8x8x8, or {GPUS[0]}:8x{NODE} for 8 nodes of {NODE} GPUs."
        )
    num_dims = TOPOLOGIES[kind][0].count("x") + 1
    if not re.fullmatch(r"\d+(x\d+)*", shape) or shape.count("x") + 1 != num_dims:
        raise config_lib.InputError(
            f"topology {name!r} must give the chips along each of {num_dims} axes, "
            f"e.g. {_near(kind, shape)}."
        )
    if not _is_slice([int(n) for n in shape.split("x")]):
        raise config_lib.InputError(
            f"there is no slice {name!r}: along each axis it has 1, 2 or {_BLOCK} "
            f"chips, or where one axis has more, on all a multiple of {_BLOCK}; near "
            f"it: {_near(kind, shape)}."
        )
    return kind


def _is_slice(shape: Sequence[int]) -> bool:
    """Returns whether a shape is a part of a block or consists of whole blocks.

    libtpu cannot tell: it accepts 512x1x1, a shape that no machine has, and crashes on
    a side of 0.
    """
    if max(shape) <= _BLOCK:
        return all(n > 0 and _BLOCK % n == 0 for n in shape)
    return all(n > 0 and n % _BLOCK == 0 for n in shape)


def _near(kind: str, shape: str) -> str:
    """Returns the three topologies of a chip that are nearest in size."""
    wanted = math.prod(int(n) or 1 for n in re.findall(r"\d+", shape))
    size = lambda known: math.prod(map(int, known.split("x")))
    distance = lambda known: abs(math.log(size(known) / wanted))
    near = sorted(sorted(TOPOLOGIES[kind], key=distance)[:3], key=size)
    return ", ".join(f"{kind}:{known}" for known in near)
