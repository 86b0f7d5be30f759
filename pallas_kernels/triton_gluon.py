"""Compiles Triton's and Gluon's kernels, and calls Gluon's from jax.

jax-triton compiles what `triton.jit` decorates. Gluon, Triton's language in which the
author chooses layouts, is compiled here, into what jax-triton hands to XLA.
"""

import dataclasses
import tempfile
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import triton
from triton.backends import compiler as backends
from triton.experimental.gluon._runtime import GluonASTSource

TARGET = "triton_kernel_call"  # as jaxlib registers it
ALIGNMENT = 16  # bytes, of arrays
TYPES = {
    "bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "bool": "i1",
    "int8": "i8", "uint8": "u8", "int32": "i32", "uint32": "u32", "int64": "i64",
    "float8_e4m3fn": "fp8e4nv",
}  # fmt: skip

_binaries: dict[str, tuple[str, int, str]] = {}  # what `_binary` returned, by launch
# Triton's cache has one folder a process, while a trainer and an engine trace at once.
_compiling = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Launch:
    """A traced call, to compile and inspect."""

    kernel: Any
    dtypes: tuple[str, ...]  # of inputs and outputs
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    constants: dict[str, Any]
    capability: int  # compute capability of the GPU, 90 for 9.0


def compiled(launch: Launch, **options: Any) -> Any:
    """Compiles a launch by Triton alone, without a device."""
    names = launch.kernel.arg_names[: len(launch.dtypes)]
    types = [f"*{TYPES[dtype]}" for dtype in launch.dtypes]
    form = GluonASTSource if launch.kernel.is_gluon() else triton.compiler.ASTSource
    source = form(
        fn=launch.kernel,
        signature=dict(zip(names, types, strict=True))
        | dict.fromkeys(launch.constants, "constexpr"),
        constexprs=launch.constants,
        attrs={(i,): [["tt.divisibility", ALIGNMENT]] for i in range(len(names))},
    )
    folders = tempfile.TemporaryDirectory()
    with _compiling, folders as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # jax-triton sets none
        return triton.compile(
            source,
            target=backends.GPUTarget("cuda", launch.capability, 32),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages}
            | options,
        )


def call(
    launch: Launch,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    zeroed: tuple[int, ...],
    *inputs: jax.Array,
) -> list[jax.Array]:
    """Calls a kernel that `gluon.jit` decorates; see `triton_call.call`."""
    opaque = _opaque(launch, tuple(out_shape), zeroed)
    run = jax.ffi.ffi_call(
        TARGET,
        out_shape,
        custom_call_api_version=2,
        legacy_backend_config=opaque,
    )
    return list(run(*inputs))


def _opaque(
    launch: Launch, out_shape: tuple[jax.ShapeDtypeStruct, ...], zeroed: tuple[int, ...]
) -> Any:
    """Returns what jaxlib needs to launch a kernel, as it reads it."""
    from jax_triton import triton_lib

    lib = triton_lib.triton_kernel_call_lib
    name, shared, ptx = _binary(launch)
    kernel = lib.TritonKernel(
        name, launch.num_warps, 1, shared, ptx, "", launch.capability
    )
    num_inputs = len(launch.dtypes) - len(out_shape)
    bytes_of = lambda x: x.size * x.dtype.itemsize
    sizes = {num_inputs + i: bytes_of(out_shape[i]) for i in zeroed}
    parameters = [
        lib.create_array_parameter(sizes.get(i, 0), ALIGNMENT)
        for i in range(len(launch.dtypes))
    ]
    grid = (*launch.grid, 1, 1)[:3]
    made = lib.TritonKernelCall(kernel, *grid, parameters)
    return zlib.compress(made.to_proto(name, b""))


def _binary(launch: Launch) -> tuple[str, int, str]:
    """Returns a kernel's name, bytes of shared memory and PTX; compiled once."""
    program = repr(dataclasses.replace(launch, grid=()))
    with _compiling:
        if program not in _binaries:
            kernel = compiled(launch)
            found = kernel.metadata.name, kernel.metadata.shared, kernel.asm["ptx"]
            _binaries[program] = found
        return _binaries[program]
