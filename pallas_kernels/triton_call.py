"""Calls a Triton kernel from jax: compiled by jax-triton, or interpreted with torch.

Sizes are compile-time constants, as shapes are in jax. A kernel gets its inputs, then
its outputs as pointers.
"""

import contextlib
import functools
import typing
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import triton
import triton.language as tl

from pallas_kernels import capabilities, dispatch, mapped, triton_gluon, varying
from pallas_kernels.triton_gluon import Launch

FORGOTTEN = 77  # fills outputs before an interpreted kernel writes


class _Recorder(list[Launch]):
    """Collects launches; `replaces` them by zeros or not."""

    replaces = False


_recorders: list[_Recorder] = []


@contextlib.contextmanager
def recorded(*, replaces: bool = False) -> Iterator[list[Launch]]:
    """Collects the launches of programs traced inside.

    Args:
      replaces: whether a launch gives zeros instead, so that neither jax-triton nor an
        interpreter is needed.
    """
    launches = _Recorder()
    launches.replaces = replaces
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.pop()


def is_interpreted(interpret: bool) -> bool:
    """Returns whether Triton's interpreter runs the launches that are traced now."""
    return interpret and not any(recorder.replaces for recorder in _recorders)


def call(
    kernel: Any,
    *inputs: jax.Array,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    zeroed_outputs: tuple[int, ...] = (),
    interpret: bool = False,
    **constants: Any,
) -> list[jax.Array]:
    """Runs `kernel[grid](*inputs, *outputs, **constants)`.

    Args:
      kernel: decorated with `triton.jit` or `gluon.jit`.
      *inputs: arrays.
      out_shape: shapes and types of the outputs.
      grid: programs along up to three axes.
      num_warps: warps per program.
      num_stages: stages of software pipelining.
      zeroed_outputs: outputs that are filled with zeros first.
      interpret: run in Triton's interpreter, in a process with TRITON_INTERPRET=1.
      **constants: the kernel's tl.constexpr arguments.
    """
    dtypes = tuple(str(x.dtype) for x in (*inputs, *out_shape))
    # Asking the driver would need a GPU while compiling.
    target = dispatch.capability() or capabilities.HOPPER
    launch = Launch(kernel, dtypes, grid, num_warps, num_stages, constants, target)
    for recorder in _recorders:
        recorder.append(launch)
    if any(recorder.replaces for recorder in _recorders):
        return [varying.zeros(x.shape, x.dtype, inputs) for x in out_shape]
    if interpret:
        run = functools.partial(_interpreted, launch, list(out_shape), zeroed_outputs)
    elif kernel.is_gluon():
        run = functools.partial(
            triton_gluon.call, launch, list(out_shape), zeroed_outputs
        )
    else:
        import jax_triton

        run = functools.partial(
            jax_triton.triton_call,
            kernel=kernel,
            out_shape=list(out_shape),
            grid=grid,
            num_warps=num_warps,
            num_stages=num_stages,
            zeroed_outputs=zeroed_outputs,
            compute_capability=target,
            **constants,
        )
    return varying.like(mapped.one_by_one(run)(*inputs), inputs)


def split(dim: int) -> tuple[int, int]:
    """Splits a dim into its largest power of two and the rest, which may be 0.

    The sides of a tile are powers of two, so a head of 192 dims is 128 and 64 of them.
    """
    first = 1 << (dim.bit_length() - 1)
    return first, dim - first


def is_split(dim: int) -> bool:
    """Returns whether each part of a dim is a power of two of 16 or more, or 0."""
    first, rest = split(dim)
    return first >= 16 and (rest == 0 or (rest >= 16 and rest & (rest - 1) == 0))


@triton.jit
@typing.no_type_check
def listed(ptr, is_entry):  # noqa: ANN001, ANN201
    """Loads entries of a list, 0 for padding: a kernel must not read at row -1."""
    return tl.maximum(tl.load(ptr, is_entry, 0), 0)


@triton.jit
@typing.no_type_check
def far(start, STEP: tl.constexpr):  # noqa: ANN001, ANN201
    """Returns start * STEP in 64 bits: a million rows exceed 2**31 elements."""
    return start * tl.full((), STEP, tl.int64)


def _interpreted(
    launch: Launch, out_shape: list, zeroed: tuple[int, ...], *inputs: jax.Array
) -> list[jax.Array]:
    """Runs the interpreter in a callback, because it takes torch tensors."""
    if not triton.knobs.runtime.interpret:
        raise NotImplementedError(
            "implementation 'gpu_interpret' needs torch, and TRITON_INTERPRET=1 in the "
            "environment before Python starts."
        )
    import torch

    def tensor(x: np.ndarray) -> Any:
        x = np.array(x)
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype.name == "float8_e4m3fn":
            return torch.from_numpy(x.view(np.int8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(x)

    def array(x: Any, like: jax.ShapeDtypeStruct) -> np.ndarray:
        x = x.view(torch.int16) if like.dtype.name == "bfloat16" else x
        return x.numpy().view(like.dtype)

    def run(*arrays: Any) -> list[np.ndarray]:
        fills = [0 if i in zeroed else FORGOTTEN for i in range(len(out_shape))]
        outs = [
            tensor(np.full(s.shape, fill).astype(s.dtype))
            for s, fill in zip(out_shape, fills, strict=True)
        ]
        ins = [tensor(np.asarray(x)) for x in arrays]
        with _mended_interpreter():
            launch.kernel[launch.grid](*ins, *outs, **launch.constants)
        return [array(x, s) for x, s in zip(outs, out_shape, strict=True)]

    return jax.pure_callback(run, out_shape, *inputs)


@contextlib.contextmanager
def _mended_interpreter() -> Iterator[None]:
    """Fixes Triton 3.6's interpreter for bfloat16 products, float8 and numpy 2.4.

    The original multiplies bfloat16 and float8 as integers, truncates instead of
    rounding to bfloat16, takes integers for bits of bfloat16, and reads float8 wrongly.
    Its loop bounds are arrays of one element, which numpy 2.4 does not convert to int.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, convert, from_int, dot = (
        interpreter._patch_lang_tensor,
        interpreter._convert_float,
        builder.create_si_to_fp,
        builder.create_dot,
    )

    def mended_patch(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def mended_convert(x: np.ndarray, old: Any, new: Any, rounding: Any) -> np.ndarray:
        if old.name == "fp32" and new.name == "bf16":
            return x.astype(ml_dtypes.bfloat16).view(np.uint16)
        if old.name == "fp8e4nv" and new.name == "fp32":
            return x.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return convert(x, old, new, rounding)

    def mended_from_int(self: Any, x: Any, kind: Any) -> Any:
        if kind.scalar.name != "bf16":
            return from_int(self, x, kind)
        bits = x.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(bits, kind.scalar)

    def mended_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return dot(self, widened(a), widened(b), *args)

    def widened(x: Any) -> Any:
        narrow = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn}
        if x.dtype.name not in narrow:
            return x
        floats = x.data.view(narrow[x.dtype.name]).astype(np.float32)
        return interpreter.TensorHandle(floats, triton.language.float32)

    with (
        np.errstate(over="ignore", invalid="ignore"),  # devices do not warn either
        mock.patch.object(interpreter, "_patch_lang_tensor", mended_patch),
        mock.patch.object(interpreter, "_convert_float", mended_convert),
        mock.patch.object(builder, "create_si_to_fp", mended_from_int),
        mock.patch.object(builder, "create_dot", mended_dot),
    ):
        yield
