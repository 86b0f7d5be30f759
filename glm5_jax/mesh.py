"""Devices in a grid with named axes: those of this machine, or of a TPU topology.

A topology is named as its chips lie, e.g. "v5p:8x8x8". libtpu compiles for one without
any chip: `pip install 'glm5_jax[aot]'`. Over several slices only the data axis goes:
between them is a data-centre network, within one a torus.
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
# Slices that are sold (cloud.google.com/tpu/docs), smallest first, to name near ones:
# libtpu takes others. A tpu7x chip is two devices.
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
DEVICES_OF_A_CHIP = {"tpu7x": 2}  # of the others: one
_BLOCK = 4  # chips along each axis of what larger slices are put together from


# So that libtpu neither looks for chips, nor complains that it finds none, nor locks
# other processes out.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def make_mesh(
    config: config_lib.MeshConfig, devices: Sequence[Any] | None = None
) -> Mesh:
    """The mesh of some devices, axis types Auto.

    The last axes are laid first, so that expert and tensor lie on whole axes of a
    torus where its shape allows.

    Args:
      config: sizes of the axes.
      devices: of `topology`; default: those that jax finds.

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
    """The devices of slices that are not there.

    Args:
      name: e.g. "v5p:8x8x8".
      num_slices: as many of that shape.

    Raises:
      InputError: there is no such topology, or no compiler for it.
    """
    kind = _require_named(name)
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
    """Returns how many devices a topology has, by its name alone: no compiler is asked.

    Raises:
      InputError: there is no such chip, or no slice of such a shape.
    """
    kind = _require_named(name)
    chips = math.prod(map(int, name.partition(":")[2].split("x")))
    return chips * DEVICES_OF_A_CHIP.get(kind, 1) * num_slices


def axis_sizes(config: config_lib.MeshConfig, num_devices: int) -> dict[str, int]:
    """Devices along each axis; data takes what is left.

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
    """Changes of one axis that make the product right, nearest sizes first."""
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
    """Lays the axes on those of the torus, whole ones where it can."""
    try:
        return mesh_utils.create_device_mesh(sizes, devices)
    except NotImplementedError:  # an axis has to share one of the torus's
        return mesh_utils.create_device_mesh(
            sizes, devices, allow_split_physical_axes=True
        )


def _require_slices(num_slices: int, devices: Sequence[Any]) -> None:
    """Checks that all TPUs are counted; hosts of GPUs may be, as jax numbers them.

    Where they are not (slices=1), any axis goes across hosts: devices come host by
    host, so the last axes stay within one.
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
    """The kind of chip of a topology's name; InputError where it has none."""
    kind, _, shape = name.partition(":")
    if kind not in TOPOLOGIES:
        raise config_lib.InputError(
            f"topology must be CHIP:SHAPE with a chip of {', '.join(TOPOLOGIES)}, got "
            f"{name!r}; e.g. v5p:8x8x8."
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
    """Returns whether it is a part of a block or made of whole ones.

    libtpu is not asked: it takes 512x1x1, whose chips no machine has in a row, and
    dies of an axis of 0.
    """
    if max(shape) <= _BLOCK:
        return all(n > 0 and _BLOCK % n == 0 for n in shape)
    return all(n > 0 and n % _BLOCK == 0 for n in shape)


def _near(kind: str, shape: str) -> str:
    """The three topologies of a chip nearest in size."""
    wanted = math.prod(int(n) or 1 for n in re.findall(r"\d+", shape))
    size = lambda known: math.prod(map(int, known.split("x")))
    distance = lambda known: abs(math.log(size(known) / wanted))
    near = sorted(sorted(TOPOLOGIES[kind], key=distance)[:3], key=size)
    return ", ".join(f"{kind}:{known}" for known in near)
