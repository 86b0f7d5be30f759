"""Compiles for chips that this machine lacks, and reports the sizes of the programs.

TPUs need libtpu from PyPI beside a CPU build of jax; an H200 needs jax-cuda13-plugin,
triton and jax-triton. The extra `aot` installs all of them. No driver and no device
is needed.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import aot_products, capabilities, chips

# An H200 SXM's driver answers XLA's queries so.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4890000000000 l2_cache_size: 52428800
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
# The smallest topology that each chip's compiler takes, by names in `chips.CHIPS`.
TOPOLOGIES = {
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
    "h200": "1x1x1",
}
TENSOR_COLUMNS = 512  # of a multiprocessor
PTX_VERSION = 87  # read by the assemblers of Triton 3.6 to 3.9


@dataclasses.dataclass(frozen=True)
class GpuKernel:
    """A Triton kernel as ptxas and its machine code report it."""

    name: str
    registers: int  # per thread
    spill_bytes: int  # stored and loaded again, per thread
    shared_bytes: int  # per program
    is_serialized: bool  # products wait for each other: far too slow
    warps: int  # per program
    capability: int  # compute capability that it is compiled for
    tensor_columns: int = 0  # of Blackwell's memory for products
    module: str = ""  # that defines it
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)  # constants
    programs: int = 1  # of a launch
    products: aot_products.Products = dataclasses.field(
        default_factory=aot_products.Products
    )

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor holds at once; 0 if one does not fit."""
        row = capabilities.row(self.capability)
        assert row is not None
        if self.shared_bytes > row.shared_kib * 1024:
            return 0
        if self.tensor_columns > TENSOR_COLUMNS:  # Triton's code then does nothing
            return 0
        # Registers are given to a warp in units of 256; the driver takes 1 KiB.
        of_a_warp = -(-self.registers * 32 // 256) * 256
        return min(
            65536 // (of_a_warp * self.warps),
            row.threads // (32 * self.warps),
            row.multiprocessor_kib * 1024 // (self.shared_bytes + 1024),
            TENSOR_COLUMNS // max(self.tensor_columns, 1),
        )

    @property
    def waves(self) -> float:
        """Times that a launch fills all multiprocessors; 0 if no program fits."""
        row = capabilities.row(self.capability)
        assert row is not None
        return self.programs / (row.cores * self.resident) if self.resident else 0.0


@dataclasses.dataclass(frozen=True)
class TpuKernel:
    """A Pallas kernel as the TPU's compiler reports it."""

    name: str
    bundles: int  # groups of parallel instructions; a loop's body counts once


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled program for one device."""

    compile_seconds: float  # from the trace on: Triton's and XLA's
    argument_bytes: int
    temp_bytes: int
    gpu_kernels: tuple[GpuKernel, ...]
    tpu_kernels: tuple[TpuKernel, ...]  # if `dump_bundles` was called


def device_mesh(chip: chips.Chip) -> Mesh:
    """A mesh of one device of the chip.

    Raises:
      RuntimeError: if the chip's compiler is not installed.
    """
    # Keeps libtpu from searching for chips and from locking out other processes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    is_gpu = chip.platform == "gpu"
    shape = TOPOLOGIES[chip.name]
    options = {"target_config": _H200, "topology": shape} if is_gpu else {}
    name = "H200" if is_gpu else shape
    try:
        topology = topologies.get_topology_desc(
            platform="cuda" if is_gpu else "tpu", topology_name=name, **options
        )
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RuntimeError(
            f"no compiler for {chip.name} here ({error}); the extra 'aot' brings it."
        ) from error
    device = np.array(topology.devices)[:1]
    return Mesh(device, ("x",), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def target(chip: chips.Chip) -> Iterator[NamedSharding]:
    """Compiles programs traced inside for the chip; arguments need the sharding."""
    mesh = device_mesh(chip)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield NamedSharding(mesh, PartitionSpec())


def compile(function: Callable, args: Any, chip: chips.Chip) -> Report:
    """Compiles `function(*args)` for one device of a chip.

    Args:
      function: the function to trace.
      args: arrays or ShapeDtypeStructs.
      chip: a key of TOPOLOGIES.
    """
    with target(chip) as sharding, _recorded(chip) as launches:
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        # A new function, because a cached trace would record no launches.
        fresh = jax.jit(lambda *xs: function(*xs))
        traced = fresh.trace(*jax.tree.map(place, args))
        seen = set(_bundle_files())
        start = time.perf_counter()
        compiled = traced.lower().compile()
        seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    return Report(
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        gpu_kernels=_distinct(launches),
        tpu_kernels=_tpu_kernels(compiled, set(_bundle_files()) - seen),
    )


_DUMP_OPTION = "--xla_jf_dump_to="


def dump_bundles(folder: pathlib.Path) -> None:
    """Makes libtpu write its bundles into a folder; call before the first compile."""
    options = f"{_DUMP_OPTION}{folder} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = options


def _bundle_files() -> Iterator[pathlib.Path]:
    """Yields the files that libtpu wrote, if `dump_bundles` was called."""
    for option in os.environ.get("LIBTPU_INIT_ARGS", "").split():
        if option.startswith(_DUMP_OPTION):
            folder = pathlib.Path(option.removeprefix(_DUMP_OPTION))
            yield from folder.glob("*[0-9]-final_bundles.txt")


def _tpu_kernels(compiled: Any, files: set[pathlib.Path]) -> tuple[TpuKernel, ...]:
    """Returns the bundles of Pallas kernels, without those of XLA's programs."""
    kernels = []
    try:
        program = compiled.as_text()
    except jax.errors.JaxRuntimeError:  # libtpu cannot print some copies on v6e
        return ()
    for path in sorted(files):
        name = path.name.split("-")[1]
        if re.search(rf"%{re.escape(name)} = .*tpu_custom_call", program):
            text = path.read_text(encoding="utf-8", errors="replace")
            bundles = re.findall(r"^ *0x[0-9a-f]+ ", text, re.MULTILINE)
            kernels.append(TpuKernel(name, len(bundles)))
    return tuple(kernels)


def kernels(function: Callable, args: Any, device_kind: str) -> tuple[GpuKernel, ...]:
    """Compiles the Triton kernels that a function launches, by Triton alone.

    Args:
      function: the function to trace, of ops with implementation="gpu_interpret",
        which needs no jax-triton.
      args: arrays or ShapeDtypeStructs.
      device_kind: jax's name of the GPU that it is traced for.
    """
    from pallas_kernels import triton_call

    device = jax.sharding.AbstractDevice(device_kind, num_cores=None, platform="gpu")
    axes = (AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), axis_types=axes, abstract_device=device
    )
    with (
        jax.sharding.use_abstract_mesh(mesh),
        triton_call.recorded(replaces=True) as launches,
    ):
        jax.eval_shape(lambda *xs: function(*xs), *args)  # new: traced again
    return _distinct(launches)


def _distinct(launches: list) -> tuple[GpuKernel, ...]:
    """Compiles each launch once, for scans are traced twice."""
    return tuple(
        map(gpu_kernel, {repr(launch): launch for launch in launches}.values())
    )


def _recorded(chip: chips.Chip) -> contextlib.AbstractContextManager:
    """Collects Triton launches on a GPU; nothing on other platforms."""
    if chip.platform != "gpu":
        return contextlib.nullcontext([])
    from pallas_kernels import triton_call

    return triton_call.recorded()


def gpu_kernel(launch: Any) -> GpuKernel:
    """Compiles a `triton_gluon.Launch` for its GPU; returns what ptxas reports."""
    import triton

    from pallas_kernels import triton_gluon

    is_blackwell = launch.capability >= 100
    tools, suffix = triton.knobs.nvidia, "a" if launch.capability >= 90 else ""
    assembler = (tools.ptxas_blackwell if is_blackwell else tools.ptxas).path
    processor = f"--gpu-name=sm_{launch.capability}{suffix}"
    options = {} if is_blackwell else {"ptx_version": PTX_VERSION}
    compiled = triton_gluon.compiled(launch, **options)
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        machine_code = ptx.with_suffix(".o")
        said = _output([assembler, "-v", processor, ptx, "-o", machine_code])
        sass = _output([tools.nvdisasm.path, "--print-code", machine_code])
    # Gluon's first representation is Triton's second.
    source = compiled.asm["ttgir" if launch.kernel.is_gluon() else "ttir"]
    products = aot_products.count(sass, source, launch.num_warps)
    number = lambda pattern: int(re.search(pattern, said).group(1))  # type: ignore
    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return GpuKernel(
        name=launch.kernel.__name__,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=spills,
        shared_bytes=compiled.metadata.shared,
        is_serialized="serialized" in said,  # warning C7515
        warps=launch.num_warps,
        capability=launch.capability,
        tensor_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
        module=launch.kernel.fn.__module__.removeprefix("pallas_kernels."),
        sizes=dict(launch.constants),
        programs=math.prod(launch.grid),
        products=products,
    )


def _output(command: list) -> str:
    """Runs a tool of Triton's package; returns what it prints, errors included."""
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr
