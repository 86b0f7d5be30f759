"""Chooses the implementation of an op by the chip that a program is traced for.

The chip is that of the mesh in use, or without a mesh jax's default device. A mesh may
have chips that this machine lacks, so that programs can be compiled ahead of time.
"""

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax import ad_checkpoint

from pallas_kernels import capabilities, chips, varying

SAVED = "pallas_kernels"  # name for rematerialisation policies: keep these arrays
KERNELS = ("tpu", "gpu")  # modules of kernels; all others are plain XLA
INTERPRETED = "_interpret"  # suffix: runs the kernel on CPU, slowly, for tests


def platform() -> str:
    """Returns the platform that a program is traced for: "cpu", "gpu" or "tpu"."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def chip() -> chips.Chip | None:
    """Returns the chip that a program is traced for, or None if it is unknown."""
    return chips.find(_device_kind())


def capability() -> int | None:
    """Returns the compute capability of the GPU that a program is traced for.

    It is 90 for 9.0, and None on other platforms or if the GPU is neither known by its
    name nor at hand.
    """
    if platform() != "gpu":
        return None
    kind = _device_kind()
    known = capabilities.named(kind)
    if known is None and jax.default_backend() == "gpu":
        asked = [d for d in jax.devices() if d.device_kind == kind]
        number = getattr(asked[0], "compute_capability", "") if asked else ""
        known = int(number.replace(".", "")) if number else None  # "9.0"
    return known


def _device_kind() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def saved(tree: Any) -> Any:
    """Names arrays that are cheaper to keep than to recompute."""
    return jax.tree.map(lambda x: ad_checkpoint.checkpoint_name(x, SAVED), tree)


@dataclasses.dataclass(frozen=True)
class Op:
    """A public function and the modules that implement it."""

    folder: str  # in pallas_kernels
    function: str  # in each module of the folder
    implementations: tuple[str, ...]  # the first is plain XLA and takes all arguments
    # "dense" or "listed" if the folder has a kernel file for each, such as tpu_dense.py
    # and tpu_listed.py. Files of plain XLA hold both forms.
    form: str | None = None
    plain_on_gpu: str | None = None  # plain XLA that suits GPUs better than the first

    def path(self, name: str) -> str:
        """Returns the full name of the module of one implementation."""
        file = f"{name}_{self.form}" if self.form and name in KERNELS else name
        return f"pallas_kernels.{self.folder}.{file}"

    def load(self, name: str) -> Callable:
        """Imports the function on demand, because the GPU's modules need Triton."""
        return getattr(importlib.import_module(self.path(name)), self.function)

    def unsupported(self, name: str, args: tuple) -> str | None:
        """Returns why an implementation cannot take the arguments here, or None."""
        axes = _automatic_axes()
        if name in KERNELS and axes:
            return (
                f"jit cannot split a kernel over the mesh's axes {axes}; call it "
                "inside jax.shard_map over them"
            )
        path = self.path(name)
        module = importlib.util.find_spec(path) and importlib.import_module(path)
        if not hasattr(module, self.function):
            return "there is no such kernel yet"
        reason = getattr(module, f"unsupported_{self.function}", None)
        return None if reason is None else reason(*args)


def run(op: Op, implementation: str | None, args: tuple) -> Any:
    """Calls the implementation of an op that fits the platform and the arguments.

    None chooses the platform's kernel if it supports the arguments, else the first
    of `op.implementations`. A named implementation never falls back to another. If
    there is nothing to compute (no queries, no rows), the reference runs.

    Args:
      op: the function.
      implementation: one of `op.implementations`, "tpu_interpret", "gpu_interpret" or
        None.
      args: arguments of the function. A module may define
        `unsupported_FUNCTION(*args)`, which returns why it cannot take them, or None.

    Raises:
      NotImplementedError: if a named implementation is unknown, is meant for another
        platform or does not support the arguments.
    """
    return _choose(op, implementation, args)(*varying.alike(args))


def would_run(op: Op, name: str, implementation: str | None, args: tuple) -> bool:
    """Returns whether `run` would call the kernel `name`, or refuse to by its name."""
    if implementation is not None:
        return implementation.removesuffix(INTERPRETED) == name
    is_here = platform() == name and not _is_empty(args) and _missing(name) is None
    return is_here and op.unsupported(name, args) is None


def _choose(op: Op, implementation: str | None, args: tuple) -> Callable:
    if implementation is None:
        return _best(op, args)
    name = implementation.removesuffix(INTERPRETED)
    is_interpreted = name != implementation
    is_kernel = name in KERNELS
    if name not in op.implementations or (is_interpreted and not is_kernel):
        raise NotImplementedError(
            f"implementation of {op.function} must be one of "
            f"{', '.join(op.implementations)} or None, got {implementation!r}."
        )
    if is_kernel and not is_interpreted and platform() != name:
        raise NotImplementedError(
            f"implementation {name!r} of {op.function} needs a {name}, this program is "
            f"for {platform()}; use '{name}{INTERPRETED}' to interpret it, slowly."
        )
    if _is_empty(args):
        return op.load("reference")
    why = _missing(name, is_interpreted) or op.unsupported(name, args)
    if why is not None:
        raise NotImplementedError(f"implementation {name!r} of {op.function}: {why}")
    chosen = op.load(name)
    return functools.partial(chosen, interpret=True) if is_interpreted else chosen


def _best(op: Op, args: tuple) -> Callable:
    """Returns the platform's kernel if one runs here, else plain XLA."""
    name, default = platform(), op.implementations[0]
    if name == "gpu" and op.plain_on_gpu is not None:
        default = op.plain_on_gpu
    if _is_empty(args):
        return op.load("reference")
    if name in op.implementations:
        why = _missing(name)
        if why is not None:  # one warning for all ops
            _warn_once(f"plain XLA runs instead of the kernels for {name}: {why}")
        else:
            why = op.unsupported(name, args)
            if why is None:
                return op.load(name)
            _warn_once(f"{op.function} runs as {default} instead of {name}: {why}")
    return op.load(default)


def _is_empty(args: tuple) -> bool:
    """Returns whether there is nothing to compute, and so nothing to tile."""
    return any(x.size == 0 for x in jax.tree.leaves(args) if hasattr(x, "size"))


def _missing(name: str, is_interpreted: bool = False) -> str | None:
    """Returns what this machine lacks to run the kernels of a platform, or None."""
    if name != "gpu":
        return None
    if platform() == "gpu":
        reason = capabilities.refusal(capability())
        if reason is not None:
            return f"this is {_device_kind()}: {reason}"
    for package in ("triton",) if is_interpreted else ("triton", "jax_triton"):
        error = _import_error(package)
        if error is not None:
            return f"{error}; the extra 'gpu' brings {package}"
    return None


@functools.cache
def _import_error(package: str) -> str | None:
    try:
        importlib.import_module(package)
    except Exception as error:  # or its version does not fit jax's
        return f"{type(error).__name__}: {error}"
    return None


def _automatic_axes() -> tuple[str, ...]:
    """Returns the mesh axes over which jit, not a shard_map, splits arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    manual = jax.sharding.AxisType.Manual
    return tuple(name for name, size, kind in axes if size > 1 and kind != manual)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)
