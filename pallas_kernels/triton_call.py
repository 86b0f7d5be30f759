"""Calls a Triton kernel from jax: compiled by jax-triton, or interpreted with torch.

Sizes are compile-time constants, as shapes are in jax. A kernel gets its inputs, then
its outputs as pointers.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import triton

FORGOTTEN = 77  # what an output holds before an interpreted kernel writes it
HOPPER = 90  # compute capability; asking the driver would need a GPU while compiling


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call as it was traced, for who wants to know what the compiler made of it."""

    kernel: Any
    dtypes: tuple[str, ...]  # of inputs and outputs
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    constants: dict[str, Any]


_recorders: list[list[Launch]] = []


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collects the launches of what is traced inside."""
    launches: list[Launch] = []
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.remove(launches)


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
      kernel: decorated with `triton.jit`.
      *inputs: arrays.
      out_shape: of the outputs.
      grid: programs along up to three axes.
      num_warps: of a program.
      num_stages: of software pipelining.
      zeroed_outputs: which outputs are filled with zeros first.
      interpret: run in Triton's interpreter, in a process with TRITON_INTERPRET=1.
      **constants: the kernel's tl.constexpr arguments.
    """
    dtypes = tuple(str(x.dtype) for x in (*inputs, *out_shape))
    launch = Launch(kernel, dtypes, grid, num_warps, num_stages, constants)
    for recorder in _recorders:
        recorder.append(launch)
    if interpret:
        return _interpreted(launch, inputs, list(out_shape), zeroed_outputs)
    import jax_triton

    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        out_shape=list(out_shape),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        zeroed_outputs=zeroed_outputs,
        compute_capability=HOPPER,
        **constants,
    )


def _interpreted(
    launch: Launch, inputs: tuple, out_shape: list, zeroed: tuple[int, ...]
) -> list[jax.Array]:
    """A callback, as the interpreter takes torch tensors."""
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
        launch.kernel[launch.grid](*ins, *outs, **launch.constants)
        return [array(x, s) for x, s in zip(outs, out_shape, strict=True)]

    return jax.pure_callback(run, out_shape, *inputs)
